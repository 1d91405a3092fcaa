"""The whole CUDA pass without a GPU: torch's products run on the CPU, the kernels' own source on the emulator."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.backend.forward_pass import SamplingParams
from penstock.backend.passes.cuda.device.kernel_choices import CONSTANTS, KernelChoices
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.passes.decoder.cuda_pass import loading, workspace_plan
from penstock.backend.passes.decoder.cuda_pass.cuda_graphs import StepGraphs
from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from tests.backend.passes.cuda.emulated_device import EmulatedDevice
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.cuda.tiny_models import (
    ARCHITECTURES,
    checkpoint,
    decode_replays,
    generated,
    greedy_choices,
    make_driver,
    make_pass,
    options,
    oracle_logits,
    prompts,
    run_prompts,
)
from tests.backend.passes.decoder.driver import Driver, run_past_window
from tests.backend.passes.decoder.test_decoder_pass import ON_ALL_PATHS

if TYPE_CHECKING:
    from numpy.typing import NDArray

DRAWN = SamplingParams(temperature=1.3, top_p=0.9, top_k=40, min_p=0.01, seed=5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_greedy_tokens_equal_transformers(architecture: str) -> None:
    """17 tokens, which fill pages. Models that together have every operation have more rows, and go on to 64 tokens
    after the shortest and the longest prompt; the other rows end, because time grows with the rows."""
    driver = make_driver(architecture)
    batch = prompts() if architecture in ON_ALL_PATHS else prompts((7, 40))
    for prompt, logits in zip(batch, run_prompts(driver, batch, chunk=19), strict=True):
        np.testing.assert_allclose(logits, oracle_logits(architecture, prompt)[-1], atol=1e-3, rtol=0)
    driver.decode(16)
    rows = list(driver.rows)
    expected = [17, 17]
    if architecture in ON_ALL_PATHS:
        expected = [64, 17, 17, 17, 64]
        for row in rows[1:-1]:
            driver.remove(row)
        driver.decode(48 - 1)
    assert [len(generated(row)) for row in rows] == expected
    for row in rows:
        assert generated(row) == greedy_choices(architecture, row)


@pytest.mark.parametrize("architecture", ["llama-bias", "mistral", "qwen2", "qwen3", "qwen3-moe"])
def test_deterministic_greedy_tokens_equal_transformers(architecture: str) -> None:
    made = EmulatedCudaPass.load(checkpoint(architecture), replace(options(), deterministic=True))
    driver = Driver(made, num_pages=32, page_size=16)
    run_prompts(driver, prompts(), chunk=19)
    driver.decode(12)
    for row in driver.rows:
        assert generated(row) == greedy_choices(architecture, row)
    assert decode_replays(made) == 12


def test_pages_behind_the_window_are_not_read() -> None:
    """The table names pages full of NaN in their place."""
    results = []
    for is_poisoned in (False, True):
        driver = Driver(make_pass("mistral"), num_pages=64, page_size=16)
        with torch.inference_mode():
            driver.forward_pass._ops.cache.fill_(0xFF)
        results.append(run_past_window(driver, is_poisoned=is_poisoned))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("page_size", [32, 64])
def test_every_page_size_gives_the_same_tokens(page_size: int) -> None:
    driver = Driver(make_pass("mistral"), num_pages=16, page_size=page_size)
    run_prompts(driver, prompts((31, 33, 64, 5)), chunk=21)
    driver.decode(8)
    for row in driver.rows:
        assert generated(row) == greedy_choices("mistral", row)


def test_settings_of_kernels_change_no_logits_but_for_rounding(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Contexts are longer than the chunks of decode attention and the tiles of prefill attention."""
    results = []
    chosen = KernelChoices(
        ring_tiles=3, carveout_percent=50, chunk_tokens=128, query_rows=64, key_tokens=32, mixed_tokens=64
    )
    with caplog.at_level("INFO"):
        for choices in (CONSTANTS, chosen):
            for module in (loading, workspace_plan):
                monkeypatch.setattr(module, "adopted_choices", lambda _device, made=choices: (made, "for a test"))
            driver = make_driver(kv_dtype="bf16")
            run_prompts(driver, prompts((140, 33, 1)), chunk=90)
            logits = driver.step([(row, 1) for row in driver.rows])
            results.append([logits[row.slot] for row in driver.rows])
            macros = [dict(kernel.macros) for kernel in driver.forward_pass._ops.kernels()]
            assert any("KEY_TOKENS" in each for each in macros) == (choices is chosen)
    np.testing.assert_allclose(*results, atol=2e-2, rtol=0)
    assert (
        "chunk_tokens 128, chunk_levels 0, query_rows 64, key_tokens 32, wgmma 0, mixed_tokens 64, product_rows 4"
        in caplog.text
    )


@pytest.mark.parametrize("architecture", ["llama3", "qwen3", "mistral"])
def test_greedy_tokens_equal_the_cpu_pass(architecture: str) -> None:
    on_cpu = CpuDecoderPass.load(checkpoint(architecture), options())
    tokens = []
    for driver in (make_driver(architecture), Driver(on_cpu, num_pages=32, page_size=16)):
        run_prompts(driver, prompts(seed=1))
        driver.decode(16)
        tokens.append([row.tokens for row in driver.rows])
    assert tokens[0] == tokens[1]


def test_hidden_states_equal_the_cpu_pass() -> None:
    """On the host and on the device, with rows that are still in their prompts, and after captured steps."""
    on_cpu = Driver(CpuDecoderPass.load(checkpoint("llama3"), options()), num_pages=32, page_size=16)
    on_cpu.read = on_cpu.forward_pass.host_hidden_states
    driver = make_driver()

    def read_both(logits: torch.Tensor) -> NDArray[np.float32]:
        on_host: NDArray[np.float32] = driver.forward_pass.host_hidden_states(logits)
        pointer = driver.forward_pass.device_hidden_states(logits).pointer
        device_rows = np.frombuffer(ctypes.string_at(pointer, on_host.nbytes), np.float32)
        np.testing.assert_array_equal(device_rows.reshape(on_host.shape), on_host)
        return on_host

    driver.read = read_both
    for each in (on_cpu, driver):
        for prompt in prompts((1, 17, 40)):
            each.add(prompt)
    for counts, num_found in (((1, 17, 5), 2), ((1, 1, 35), 3), ((1, 1, 1), 3), ((1, 1, 1), 3)):
        expected, found = (each.step(list(zip(each.rows, counts, strict=True))) for each in (on_cpu, driver))
        assert len(found) == num_found
        for slot, states in found.items():
            np.testing.assert_allclose(states, expected[slot], atol=1e-4, rtol=0)
    assert decode_replays(driver.forward_pass) == 2


def test_captured_steps_equal_the_same_steps_launched_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = make_driver()
    run_prompts(captured, prompts())
    captured.decode(8)
    assert decode_replays(captured.forward_pass) == 8
    assert captured.forward_pass.device.graphs[0].num_replays == 8, "5 rows are padded to the 6 of the largest graph"
    monkeypatch.setattr(StepGraphs, "size_for", lambda _self, _num_rows: None)
    eager = make_driver()
    run_prompts(eager, prompts())
    eager.decode(8)
    assert not any(graph.num_replays for graph in eager.forward_pass.device.graphs)
    assert [row.tokens for row in captured.rows] == [row.tokens for row in eager.rows]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6])
def test_a_decode_step_of_any_number_of_rows_finds_a_graph(num_rows: int) -> None:
    driver = make_driver()
    run_prompts(driver, prompts((3, 20, 33, 5, 18, 2)[:num_rows]))
    driver.decode(3)
    assert decode_replays(driver.forward_pass) == 3
    for row in driver.rows:
        assert generated(row) == greedy_choices("llama3", row)


def test_a_step_takes_one_copy_to_the_device_and_one_back() -> None:
    driver = make_driver()
    run_prompts(driver, prompts())
    device = driver.forward_pass.device
    for _ in range(3):
        before = device.num_events
        driver.decode(1)
        assert device.num_events == before + 2


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_a_prompt_in_chunks_gives_the_same_logits_as_whole(chunk: int) -> None:
    prompt = prompts((45,))[0]
    whole = run_prompts(make_driver(), [prompt])[0]
    np.testing.assert_allclose(run_prompts(make_driver(seed=1), [prompt], chunk)[0], whole, atol=1e-4, rtol=0)


def test_a_row_has_the_same_tokens_alone_and_in_a_batch() -> None:
    prompt, *others = prompts((37, 1, 9, 30, 16), seed=2)
    tokens = []
    for batch in ([prompt], [prompt, *others]):
        driver = make_driver("qwen3")
        run_prompts(driver, batch)
        driver.decode(12)
        tokens.append(driver.rows[0].tokens)
    assert tokens[0] == tokens[1]


def test_rows_of_one_token_and_of_many_share_a_step() -> None:
    driver = make_driver("mistral")
    first = driver.add(prompts((20,))[0])
    driver.prefill()
    second = driver.add(prompts((50,), seed=1)[0])
    while second.computed < second.num_prompt_tokens:
        driver.step([(first, 1), (second, min(13, second.num_prompt_tokens - second.computed))])
    driver.decode(4)
    for row in (first, second):
        assert generated(row) == greedy_choices("mistral", row)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "bound"),
    [
        ("fp32", "bf16", 0.02),
        ("fp32", "q8_0", 0.03),
        ("fp32", "fp8", 0.15),
        ("bf16", "fp32", 0.06),
        ("bf16", "bf16", 0.06),
        ("bf16", "q8_0", 0.06),
        ("bf16", "fp8", 0.15),
    ],
)
def test_narrower_dtypes_stay_close_to_fp32(dtype: str, kv_dtype: str, bound: float) -> None:
    """The bound is on the RMS of the difference relative to the RMS of the logits; e4m3 rounding alone gives 0.06."""
    batch = prompts(seed=6)
    driver = make_driver("qwen3", kv_dtype, dtype)
    rows = [driver.add(prompt) for prompt in batch]
    logits = driver.prefill(chunk=23)
    for _ in range(3):
        for row in rows:
            exact = oracle_logits("qwen3", row.tokens[: row.computed])[-1]
            assert np.sqrt(np.mean((logits[row.slot] - exact) ** 2) / np.mean(exact**2)) < bound
        logits = driver.step([(row, 1) for row in rows])


def test_memory_of_other_sequences_is_never_read() -> None:
    results = []
    for poisoned in (False, True):
        driver = make_driver("mistral", "bf16")
        if poisoned:
            with torch.inference_mode():
                driver.forward_pass._ops.cache.fill_(0xFF)  # NaN in every number
        logits = run_prompts(driver, prompts(seed=5), chunk=7)
        driver.decode(18)
        results.append((logits, [row.tokens for row in driver.rows]))
    np.testing.assert_array_equal(results[1][0], results[0][0])
    assert results[1][1] == results[0][1]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("architecture", ["llama3", "ministral"])
def test_a_short_chunk_after_a_long_history_equals_the_cpu_pass(architecture: str, deterministic: bool) -> None:
    """Its history has two segments, whose pages repeat those of two short prompts. ministral has a window too."""
    model_dir = checkpoint(architecture, max_position_embeddings=4096)
    on_cpu = CpuDecoderPass.load(model_dir, options())
    emulated = EmulatedCudaPass.load(model_dir, replace(options(), deterministic=deterministic))
    tokens = prompts((2533,), seed=3)[0]
    logits = []
    for made in (on_cpu, emulated):
        driver = Driver(made, num_pages=160, page_size=16, kv_dtype="bf16")
        repeated = [driver.add(prompt) for prompt in prompts((32, 48), seed=4)]
        driver.prefill()
        first, second = (np.reshape(row.pages, (-1, driver.num_groups)) for row in repeated)
        history = [np.resize(first, (128, driver.num_groups)), np.resize(second, (30, driver.num_groups))]
        row = driver.add(tokens)
        row.pages, row.computed = np.concatenate(history).ravel().tolist(), 2528
        logits.append(driver.step([(row, 5)])[row.slot])
    row.computed = 2528
    batch = driver.build([(row, 5)])
    tiles = emulated._ops.tiling.tiles(batch.query_starts, batch.context_lens, 0, None)
    assert tiles[:, 2].tolist() == [0, 2048]
    assert np.sqrt(np.mean((logits[1] - logits[0]) ** 2) / np.mean(logits[0] ** 2)) < 3e-3


def test_a_copied_page_equals_its_source() -> None:
    driver = make_driver()
    prompt = prompts((40,))[0]
    row = driver.add(prompt)
    expected = driver.prefill()[row.slot]
    fork = driver.add(prompt)
    fork.pages = [row.pages[0], driver.free_pages.pop(), driver.free_pages.pop()]
    fork.computed = 39
    batch = driver.build([(fork, 1)])
    copies = tuple(zip(row.pages[1:3], fork.pages[1:3], strict=True))
    logits = driver.forward_pass.host_logits(driver.forward_pass.forward(replace(batch, page_copies=copies)))[0]
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="pages to copy are 0 … 32; there are 32"):
        driver.forward_pass.forward(replace(batch, page_copies=((0, 32),)))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "deterministic"), [("fp32", "fp32", False), ("bf16", "q8_0", False), ("bf16", "q8_0", True)]
)
def test_whole_steps_have_no_races_and_stay_in_bounds(dtype: str, kv_dtype: str, deterministic: bool) -> None:
    """The steps run in the emulator's checking mode and use every kernel of the sampler."""
    device = EmulatedDevice(mode="check")
    pass_options = replace(options(dtype, max_batch_tokens=32), deterministic=deterministic)
    made = CudaDecoderPass.load(checkpoint("qwen3"), pass_options, device)
    driver = Driver(made, num_pages=8, page_size=16, kv_dtype=kv_dtype)
    everything = replace(
        DRAWN, typical_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1, logit_bias=((3, 1.0),), num_logprobs=2
    )
    rows = [driver.add([1, 2, 3, 4, 5], everything), driver.add(range(20))]
    driver.prefill()
    driver.decode(2)
    assert [len(generated(row)) for row in rows] == [3, 3]
    assert generated(rows[1]) == greedy_choices("qwen3", rows[1]) or dtype == "bf16"
    prefill = "prefill_attention_fp32" if kv_dtype == "fp32" else "prefill_attention_wgmma"
    of_one_token = set() if deterministic else {"plan_decode", "decode_attention"}
    if dtype == "bf16" and not deterministic:
        of_one_token |= {"weigh_rows", "multiply_and_add", "multiply_and_gate", "multiply_and_store", "multiply_rows"}
    assert set(device.launcher.launched) - of_one_token == {
        "embed", "add_rms_norm", "rope_and_store", "silu_mul", prefill, "gather_rows", "change_pages", "take_slots",
        "scan_rows", "list_tokens", "filter_rows", "log_probabilities",
    }  # fmt: skip
    assert of_one_token <= set(device.launcher.launched)
