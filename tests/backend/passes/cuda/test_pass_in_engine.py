"""The CUDA pass in the real engine with the real executor, a step ahead, and its faults."""

from __future__ import annotations

import gc
import select
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.engine.loop import Engine
from penstock.backend.engine.steps.batch_builder import BatchBuilder
from penstock.backend.engine.steps.executor import Executor, ExecutorFailed
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import FROM_SLOT, DeviceLost, PassOptions, SlotInit, StepBatch
from penstock.backend.passes.cuda.device.launcher import KernelFailed
from penstock.backend.passes.cuda.device.link_probe import LinkSpeed
from penstock.backend.passes.decoder.cuda_pass import workspace_plan as plan
from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from penstock.shm.messages import Failure, Finish
from tests.backend.harness import Bench, ScriptedLink
from tests.backend.passes.cuda.deferred_device import DeferredCudaPass
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.cuda.tiny_models import (
    MAX_ROWS,
    VOCAB_SIZE,
    checkpoint,
    decode_replays,
    generated,
    make_driver,
    make_pass,
    options,
    oracle_logits,
    prompts,
)
from tests.backend.passes.decoder.driver import GREEDY, Driver
from tests.checkpoints import load_oracle, make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.backend.scheduling.drafting import Drafting


PAGE_SIZE = 16


class AheadBench(Bench):
    """A bench with the executor's threads: steps are launched while one runs, and another thread waits for tokens."""

    def __init__(
        self,
        forward_pass: EmulatedCudaPass | DeferredCudaPass,
        num_pages: int,
        capacity: int = 1,
        num_host_pages: int = 0,
        link: ScriptedLink | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        settings: dict[str, Any] = {
            "num_pages": num_pages,
            "page_size": PAGE_SIZE,
            "max_running": MAX_ROWS,
            "max_batch_tokens": 48,
        }
        settings |= {"num_host_pages": num_host_pages, "capacity": capacity, "link": link}
        settings["drafting"] = drafting
        super().__init__(**settings, vocab_size=VOCAB_SIZE, forward_pass=forward_pass)
        self.threads = Executor(capacity)
        self.threads.start(lambda: forward_pass)
        builder = BatchBuilder(MAX_ROWS, num_pages, len(forward_pass.spec.kv_windows))
        self.engine = Engine(self.link, self.threads, self.scheduler, builder, self.requests, self.board, self.clock)

    def turn(self) -> None:
        """Run one turn of the engine, then wait for a step to end if one runs."""
        self.engine.turn()
        self.engine.check_integrity()
        is_waited_for = self.threads.is_busy or self.threads.running_s() > 0  # a draft model may guess
        # 0.001: a draft model's turn may be given to its thread, which has not begun it
        select.select([self.threads.wake_fd], [], [], 10 if is_waited_for else 0.001)

    def run_dry(self, max_turns: int = 5000) -> int:
        for turn in range(max_turns):
            if not self.link.arrivals and not self.requests.table.num_open and not self.threads.is_busy:
                return turn
            self.turn()
        raise AssertionError(f"{self.requests.table.num_open} requests still open after {max_turns} turns")

    def close(self) -> None:
        self.threads.close()
        super().close()


def greedy(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(oracle_logits("llama3", tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def load(
    pass_class: type[EmulatedCudaPass | DeferredCudaPass], num_host_pages: int
) -> EmulatedCudaPass | DeferredCudaPass:
    settings = options(max_batch_tokens=48)
    page_bytes = PAGE_SIZE * pass_class.describe(checkpoint("llama3"), settings).kv_bytes_per_token["fp32"]
    return pass_class.load(checkpoint("llama3"), replace(settings, host_kv_bytes=num_host_pages * page_bytes))


@pytest.fixture(
    params=[
        (EmulatedCudaPass, 1, 9, 16),
        (DeferredCudaPass, 1, 9, 0),
        (DeferredCudaPass, 4, 32, 0),
        (DeferredCudaPass, 4, 9, 16),
    ],
    ids=["work at once", "late work", "far ahead, enough pages", "far ahead, kept on the host"],
)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AheadBench]:
    """With enough pages, or with so few that sequences are preempted."""
    monkeypatch.setattr(
        "penstock.backend.passes.decoder.cuda_pass.forward_pass.measure_link", lambda _device: LinkSpeed(1e18, 1e18)
    )
    pass_class, capacity, on_device, on_host = request.param
    made = AheadBench(load(pass_class, on_host), on_device, capacity, on_host)
    assert made.forward_pass.num_host_pages == on_host
    yield made
    made.close()


def test_every_stream_equals_the_oracles_greedy_stream(bench: AheadBench) -> None:
    batch = prompts((5, 20, 33, 47, 12), seed=3)
    for request_id, prompt in enumerate(batch):
        bench.submit(list(prompt), 30, request_id=request_id)
    bench.run_dry()
    for request_id, prompt in enumerate(batch):
        assert bench.received(request_id).token_ids == greedy(prompt, 30)
        assert bench.received(request_id).finishes == [Finish.LENGTH]
    assert (bench.scheduler.num_preemptions > 0) == (bench.pool.num_pages == 9)
    # The number of saves depends on the timing of threads; a page may be restored more than once.
    assert bench.board.pages_restored == 0 or bench.board.pages_saved > 0
    assert bench.board.pages_saved == 0 or bench.forward_pass.num_host_pages > 0
    assert decode_replays(bench.forward_pass) > 0


def test_streams_equal_the_oracle_with_shared_prefixes_cancellations_and_late_arrivals(bench: AheadBench) -> None:
    rng = np.random.default_rng(11)
    prefix = prompts((32,), seed=8)[0]
    submitted: dict[int, tuple[tuple[int, ...], int]] = {}
    cancelled = {2, 5, 9}
    for request_id in range(14):
        tail = tuple(rng.integers(0, VOCAB_SIZE, rng.integers(1, 30)).tolist())
        submitted[request_id] = (prefix + tail if request_id % 3 == 0 else tail, int(rng.integers(1, 14)))
        prompt, count = submitted[request_id]
        bench.submit(list(prompt), count, request_id=request_id)
        for _ in range(int(rng.integers(0, 4))):
            bench.engine.turn()
        if request_id in cancelled:
            bench.cancel(request_id)
    bench.run_dry()
    for request_id, (prompt, count) in submitted.items():
        received = bench.received(request_id)
        assert received.token_ids == greedy(prompt, count)[: len(received.token_ids)]
        if request_id not in cancelled:
            assert received.finishes == [Finish.LENGTH]
            assert len(received.token_ids) == count


def test_a_preempted_sequence_continues_with_pages_restored_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns do not depend on threads, so that pages are saved and restored in every run."""
    monkeypatch.setattr(
        "penstock.backend.passes.decoder.cuda_pass.forward_pass.measure_link", lambda _device: LinkSpeed(1e18, 1e18)
    )
    bench = Bench(
        num_pages=9, page_size=PAGE_SIZE, max_running=MAX_ROWS, max_batch_tokens=48, vocab_size=VOCAB_SIZE,
        num_host_pages=16, forward_pass=load(EmulatedCudaPass, 16),
    )  # fmt: skip
    batch = prompts((5, 20, 33, 47, 12), seed=3)
    for request_id, prompt in enumerate(batch):
        bench.submit(list(prompt), 18, request_id=request_id)
    bench.run_dry()
    for request_id, prompt in enumerate(batch):
        assert bench.received(request_id).token_ids == greedy(prompt, 18)
    assert bench.board.pages_saved > 0
    assert bench.board.pages_restored > 0
    bench.close()


def launch(forward_pass: EmulatedCudaPass, ids: list[int], start: int) -> Any:
    init = SlotInit(3, GREEDY, np.array(ids, np.int32), len(ids))
    batch = StepBatch(
        input_ids=np.array(ids, np.int32),
        query_starts=np.array([0, len(ids)], np.int32),
        context_lens=np.array([start], np.int32),
        page_table=np.array([[4, 2]], np.int32),
        slots=np.array([3], np.int32),
        logit_rows=np.zeros(1, np.int32),
        slot_inits=(init,) if start == 0 else (),
    )
    return forward_pass.sample(forward_pass.forward(batch), batch)


def test_steps_are_launched_before_earlier_tokens_are_awaited() -> None:
    driver = make_driver()
    prompt = prompts((9,))[0]
    ahead = [launch(driver.forward_pass, list(prompt), 0)]
    ahead += [launch(driver.forward_pass, [FROM_SLOT], 9 + step) for step in range(5)]
    tokens = [int(pending.wait().token_ids[0]) for pending in reversed(ahead)][::-1]
    assert tokens == greedy(prompt, 6)


def test_a_device_fault_loses_the_device_and_names_step_and_kernel() -> None:
    driver = make_driver()
    pending = launch(driver.forward_pass, [1, 2, 3], 0)
    driver.forward_pass.device.fault = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(DeviceLost, match=r"a step of 3 tokens in 1 rows: an illegal memory access .* scan_rows\["):
        pending.wait()
    with pytest.raises(DeviceLost, match="a step of 1 tokens in 1 rows"):
        [launch(driver.forward_pass, [FROM_SLOT], 3 + step) for step in range(3)]


def test_a_device_lost_while_rows_are_read_is_reported_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    forward_pass = make_driver().forward_pass
    logits = torch.zeros(2, VOCAB_SIZE)
    forward_pass.device.fault = RuntimeError("an illegal memory access was encountered")
    monkeypatch.setattr(torch.Tensor, "float", Mock(side_effect=forward_pass.device.fault))
    for read in (forward_pass.host_logits, forward_pass.device_logits, forward_pass.device_hidden_states):
        with pytest.raises(DeviceLost, match=r"copying 2 .*: an illegal memory access"):
            read(logits)


def test_the_engine_fails_the_steps_requests_and_then_ends_with_a_lost_device() -> None:
    bench = AheadBench(make_pass(max_batch_tokens=48), 8)
    bench.submit([1, 2, 3], 8)
    bench.forward_pass.device.fault = RuntimeError("unspecified launch failure")
    with pytest.raises(ExecutorFailed, match="the device is lost"):
        bench.run_dry()
    assert bench.received().finishes == [Finish.FAILED]
    bench.forward_pass.device.fault = None
    bench.close()


def test_a_step_that_runs_out_of_memory_fails_alone_and_is_named_with_its_last_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = AheadBench(make_pass(max_batch_tokens=48), 8)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", raise_out_of_memory)
        bench.submit([1, 2, 3], 4, request_id=1)
        bench.run_dry()
    assert bench.received(1).finishes == [Finish.FAILED]
    assert isinstance(bench.received(1).failure, Failure)
    assert "CUDA out of memory. Tried to allocate 2.00 GiB" in caplog.text
    assert "in a step of 3 tokens in 1 rows; last launch: decode_attention[" in caplog.text
    prompt = prompts((7,))[0]
    bench.submit(list(prompt), 4, request_id=2)
    bench.run_dry()
    assert bench.received(2).token_ids == greedy(prompt, 4)
    bench.close()


def raise_out_of_memory(*_args: Any, **_kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_an_invalid_batch_fails_and_the_next_one_runs() -> None:
    driver = make_driver()
    with pytest.raises(ValueError, match="token ids are 1 … 777; the vocabulary has 200"):
        launch(driver.forward_pass, [1, 777], 0)
    row = driver.add(prompts((7,))[0])
    driver.prefill()
    driver.decode(2)
    assert generated(row) == greedy(prompts((7,))[0], 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_dim": 32}, "head_dim is 32; it must be one of 64, 80, 96, 128, 256; use --gpu none"),
        ({"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 64}, "32 heads share 1 KV heads"),
        ({"hidden_size": 68, "head_dim": 64}, "hidden_size is 68; it must be a multiple of 8"),
    ],
)
def test_an_unsupported_model_is_refused_in_one_line(settings: dict[str, int], message: str, tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama3", tmp_path, num_hidden_layers=1, **settings)
    for start in (CudaDecoderPass.describe, EmulatedCudaPass.load):
        with pytest.raises(StartupError) as caught:
            start(model_dir, PassOptions(dtype="fp32"))
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_variation_without_kernels_is_refused_by_name() -> None:
    config = replace(read_decoder_config(checkpoint("cohere")), qk_norm="head")
    missing = (
        "CohereForCausalLM is not on the GPU yet: there are no kernels for layer norms of q and k without a weight"
    )
    with pytest.raises(StartupError, match=f"{missing}.*; use --gpu none"):
        plan.check_model_supported(config, plan.StepSizes(1, 1, 1))


def test_a_kernel_that_does_not_run_is_reported_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_pass()

    def fail(kernels: Any) -> None:
        raise KernelFailed(f"{next(iter(kernels))} cannot be compiled: no such header\nand more")

    monkeypatch.setattr(made.device.launcher, "prepare", fail)
    with pytest.raises(StartupError, match=r"kernels do not run: embed\[ACT=0\] cannot be compiled: no such header \("):
        made.create_cache(8, 16, "fp32")


def test_a_step_that_does_not_fit_beside_the_cache_is_reported_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_pass()
    monkeypatch.setattr(torch, "mm", raise_out_of_memory)
    with pytest.raises(StartupError) as caught:
        made.create_cache(8, 16, "fp32")
    assert str(caught.value) == (
        "a step does not fit into GPU memory beside the KV cache: CUDA out of memory. Tried to allocate 2.00 GiB "
        "(last launch: add_rms_norm[ACT=0] (6, 1, 1)); lower --kv-budget"
    )


def test_fp16_weights_stay_fp16_on_a_gpu(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama3", tmp_path, dtype=torch.float16, num_hidden_layers=1, head_dim=64)
    made = EmulatedCudaPass.load(model_dir, PassOptions(max_running=2, max_batch_tokens=16))
    assert made._dtype is torch.float16
    assert list(made.spec.kv_bytes_per_token) == ["bf16", "q8_0", "fp8", "fp32"]
    driver = Driver(made, num_pages=4, page_size=16, kv_dtype="bf16")
    row = driver.add([3, 1, 4, 1, 5])
    logits = driver.prefill()[row.slot]
    with torch.inference_mode():
        exact = load_oracle(model_dir)(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, -1].numpy()
    assert np.sqrt(np.mean((logits - exact) ** 2) / np.mean(exact**2)) < 0.02


def test_an_unsupported_page_size_is_refused() -> None:
    with pytest.raises(StartupError, match="page_size_tokens is 8; it must be one of 16, 32, 64"):
        make_pass().create_cache(8, 8, "fp32")


@pytest.mark.parametrize(
    ("architecture", "dtype", "deterministic", "quantize"),
    [
        ("mistral", "fp32", False, "none"),
        ("mistral", "bf16", False, "none"),
        ("mistral", "bf16", True, "none"),
        ("qwen2-moe", "bf16", True, "none"),
        ("qwen3", "bf16", False, "int8"),
        ("qwen3.5", "bf16", False, "none"),
        ("gemma4-e", "bf16", True, "none"),
        ("gemma4-moe", "bf16", False, "none"),
        ("gemma3n", "bf16", True, "none"),
        ("llama3 with 4096 tokens", "bf16", False, "none"),
        ("llama3 with 4096 tokens", "bf16", True, "none"),
    ],
)
def test_the_pass_takes_the_announced_memory(architecture: str, dtype: str, deterministic: bool, quantize: str) -> None:
    """Exact to the byte, except alignment and decode attention's scratch. Libraries and graphs are estimates on top.
    Every kernel in a graph is counted; fused steps have fewer than a plan says.

    From 2,049 tokens, prefill attention has a workspace for segments.
    """
    before = storages()
    architecture, _, max_tokens = architecture.removesuffix(" tokens").partition(" with ")
    model_dir = checkpoint(architecture, max_position_embeddings=int(max_tokens or 512))
    pass_options = replace(options(dtype), deterministic=deterministic, quantize=quantize)
    made = EmulatedCudaPass.load(model_dir, pass_options)
    assert made.spec == CudaDecoderPass.describe(model_dir, pass_options)
    made.create_cache(num_pages=256, page_size_tokens=16, kv_dtype="q8_0")
    cache_bytes = 256 * 16 * made.spec.kv_bytes_per_token["q8_0"]
    assert made._ops.cache.numel() + made._ops.full_cache.numel() == cache_bytes
    cache_bytes += MAX_ROWS * made.spec.state_bytes_per_sequence
    taken = storages()
    for pinned in made.device.pinned_tensors:
        del taken[pinned.data_ptr()]
    taken_bytes = sum(num_bytes for address, num_bytes in taken.items() if address not in before)
    estimates = made.spec.graph_bytes + plan.LIBRARY_BYTES
    announced_bytes = made.spec.weight_bytes + cache_bytes + made.spec.workspace_bytes - estimates
    assert taken_bytes <= announced_bytes <= taken_bytes + 70_000
    graph_bytes = sum(len(graph.calls) for graph in made.device.graphs) * plan._NODE_BYTES
    assert graph_bytes <= made.spec.graph_bytes <= 2 * graph_bytes
    made.close()


def storages() -> dict[int, int]:
    """Return address → bytes of all memory that tensors hold."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
