"""Features of the engine and the CUDA pass combined in one step: prompts of embeddings, pages restored from the host,
plans far ahead, deterministic steps, faults.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock.backend.engine.steps.executor import ExecutorFailed
from penstock.backend.passes.cuda.device.link_probe import LinkSpeed
from penstock.shm.buffers.device_api import DeviceError
from penstock.shm.link.events import FrontendDeath
from penstock.shm.messages import Constraints, Finish, Sampling
from tests.backend.harness import GREEDY, Bench, Received
from tests.backend.passes.cuda.deferred_device import DeferredCudaPass
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.cuda.lending import KINDS, LendingLink
from tests.backend.passes.cuda.test_pass_in_engine import AheadBench
from tests.backend.passes.cuda.tiny_models import MAX_ROWS, VOCAB_SIZE, checkpoint, options, oracle, prompts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.backend.forward_pass import StepBatch

    Rows = NDArray[np.float32]

PAGE_SIZE, HIDDEN = 16, 64
WITH_LOGPROBS = Sampling(temperature=0.0, num_logprobs=2)
ALLOWED = tuple(range(3, VOCAB_SIZE, 3))


@pytest.fixture(autouse=True)
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make copying pages faster than computing them."""
    monkeypatch.setattr(
        "penstock.backend.passes.decoder.cuda_pass.forward_pass.measure_link", lambda _device: LinkSpeed(1e18, 1e18)
    )


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(
    pass_class: type[EmulatedCudaPass | DeferredCudaPass] = EmulatedCudaPass,
    num_host_pages: int = 0,
    kv_dtype: str = "fp32",
    **settings: Any,
) -> EmulatedCudaPass | DeferredCudaPass:
    pass_options = replace(options(max_batch_tokens=48), **settings)
    page_bytes = PAGE_SIZE * pass_class.describe(checkpoint("llama3"), pass_options).kv_bytes_per_token[kv_dtype]
    made = pass_class.load(checkpoint("llama3"), replace(pass_options, host_kv_bytes=num_host_pages * page_bytes))
    create = made.create_cache
    made.create_cache = lambda num_pages, page_size, _: create(num_pages, page_size, kv_dtype)  # type: ignore[method-assign]
    return made


def make_link(kind: str, directory: Path, forward_pass: EmulatedCudaPass | DeferredCudaPass) -> LendingLink:
    return LendingLink(kind, directory, forward_pass.spec.embedding_size, VOCAB_SIZE, forward_pass.device)


def stepped(
    forward_pass: EmulatedCudaPass | DeferredCudaPass, link: LendingLink | None, num_pages: int, **settings: Any
) -> Bench:
    """Make a bench that runs turn by turn, so that pages are saved to the host and restored in every run."""
    defaults = {"max_batch_tokens": 48, "num_host_pages": 16, "max_running": MAX_ROWS, "vocab_size": VOCAB_SIZE}
    return Bench(
        forward_pass=forward_pass, link=link, num_pages=num_pages, page_size=PAGE_SIZE, **(defaults | settings)
    )


def close(bench: Bench, link: LendingLink) -> None:
    """Close the bench. Nothing may be lent, page-locked, allocated or held any more."""
    assert link.num_lent == 0
    assert bench.pool.num_held == 0
    link.close()
    device = link.device
    assert (link.exporter.held_bytes, device.num_allocated, device.num_events, device.registered) == (0, 0, 0, {})
    bench.close()


def random_rows(num_rows: int, seed: int) -> Rows:
    return np.random.default_rng(seed).normal(0.0, 0.2, (num_rows, HIDDEN)).astype(np.float32)


def looked_up(tokens: Sequence[int]) -> Rows:
    """Return the tokens' embeddings in the checkpoint, [n, hidden]."""
    with torch.inference_mode():
        rows: Rows = oracle("llama3").get_input_embeddings()(torch.tensor(tokens)).numpy()
    return rows


def logits_after(prompt: Rows, generated: Sequence[int]) -> torch.Tensor:
    """Return the logits by transformers from which each generated token was sampled, [len(generated), vocab]."""
    rows = np.concatenate([prompt, looked_up(generated[:-1])]) if len(generated) > 1 else prompt
    with torch.inference_mode():
        logits: torch.Tensor = oracle("llama3")(inputs_embeds=torch.from_numpy(rows)[None]).logits[0]
    return logits[len(prompt) - 1 :]


def expect_transformers(prompt: Rows, received: Received, count: int | None, allowed: Sequence[int] = ()) -> None:
    """Compare count tokens (all tokens if None) with transformers, and their log probabilities if requested."""
    tokens = received.token_ids
    if count is not None:
        assert received.finishes == [Finish.LENGTH]
        assert len(tokens) == count
    if not tokens:
        return
    logits = logits_after(prompt, tokens)
    ids = list(allowed) or list(range(VOCAB_SIZE))
    assert tokens == [ids[place] for place in logits[:, ids].argmax(1).tolist()]
    for token, reported, row in zip(tokens, received.logprobs, logits.log_softmax(1), strict=True):
        if reported is not None:
            assert abs(reported.logprob - row[token].item()) < 1e-3
            assert abs(reported.top_logprobs[0] - row.max().item()) < 1e-3


# ---- Streams ----

TOKENS = {5: prompts((5,), seed=3)[0], 6: prompts((40,), seed=3)[0]}


@cache
def embedded() -> dict[int, Rows]:
    return {1: random_rows(20, 1), 2: random_rows(33, 2), 3: random_rows(1, 3), 4: looked_up(prompts((12,))[0])}


def submit_all(bench: Bench, link: LendingLink) -> None:
    for request_id, rows in embedded().items():
        constraints = Constraints(allowed_token_ids=ALLOWED) if request_id == 2 else None
        link.submit(
            rows, 18, request_id, sampling=WITH_LOGPROBS if request_id != 3 else GREEDY, constraints=constraints
        )
    for request_id, prompt in TOKENS.items():
        bench.submit(list(prompt), 18, request_id=request_id)


def expect_all(bench: Bench, unfinished: Sequence[int] = ()) -> None:
    for request_id, rows in (embedded() | {number: looked_up(prompt) for number, prompt in TOKENS.items()}).items():
        count = None if request_id in unfinished else 18
        expect_transformers(rows, bench.received(request_id), count, ALLOWED if request_id == 2 else ())


@pytest.mark.parametrize(
    ("kind", "pass_class", "capacity"),
    [
        (KINDS[0], EmulatedCudaPass, 0),
        (KINDS[1], DeferredCudaPass, 1),
        *((kind, DeferredCudaPass, 4) for kind in KINDS),
    ],
)
def test_every_stream_equals_transformers_for_any_kind_of_prompt(
    kind: str, pass_class: type[EmulatedCudaPass | DeferredCudaPass], capacity: int, tmp_path: Path
) -> None:
    """There are too few pages: sequences are preempted, and continue with restored pages or with rows read again."""
    forward_pass = load(pass_class, 16)
    link = make_link(kind, tmp_path, forward_pass)
    bench = AheadBench(forward_pass, 9, capacity, 16, link)
    submit_all(bench, link)
    bench.run_dry()
    expect_all(bench)
    assert bench.scheduler.num_preemptions > 0
    close(bench, link)


@pytest.mark.parametrize(
    ("kind", "turn"), [(KINDS[0], 1), (KINDS[0], 9), (KINDS[1], 4), (KINDS[1], 15), (KINDS[2], 4), (KINDS[2], 9)]
)
def test_a_cancelled_or_dead_client_does_not_affect_other_streams(kind: str, turn: int, tmp_path: Path) -> None:
    """The device is far behind, and reads buffers that have been returned to their clients, or are gone."""
    forward_pass = load(DeferredCudaPass, 16)
    link = make_link(kind, tmp_path, forward_pass)
    bench = AheadBench(forward_pass, 9, 4, 16, link)
    for number in range(3):
        link.submit(random_rows(25 + number, number), 18, 20 + number, frontend=2, sampling=WITH_LOGPROBS)
    submit_all(bench, link)
    for _ in range(turn):
        bench.engine.turn()
    bench.cancel(2)
    bench.cancel(6)
    link.arrivals.append(FrontendDeath(2))
    bench.engine.turn()
    assert 2 not in link.clients
    link.submit(random_rows(9, 7), 5, 7)  # in the buffer that has just been returned
    bench.run_dry()
    expect_all(bench, unfinished=(2, 6))
    expect_transformers(random_rows(9, 7), bench.received(7), 5)
    for number in range(3):
        expect_transformers(random_rows(25 + number, number), bench.received(20 + number, 2), None)
    close(bench, link)


# ---- Deterministic ----

PROMPT = prompts((41,), seed=5)[0]
NUM_BITS = 16
"""Tokens of each stream whose bits are compared."""
DRAWN = Sampling(temperature=1.3, top_p=0.95, seed=77, num_logprobs=3)


def bits(received: Received) -> list[Any]:
    return [received.token_ids, received.logprobs]


@cache
def bits_of_tokens_alone() -> list[Any]:
    bench = stepped(load(kv_dtype="q8_0", deterministic=True), None, 64, num_host_pages=0)
    bench.submit(list(PROMPT), NUM_BITS, sampling=DRAWN)
    bench.run_dry()
    bench.close()
    assert len(bench.received().token_ids) == NUM_BITS
    return bits(bench.received())


@pytest.mark.parametrize(
    ("kind", "num_pages", "num_host_pages", "settings"),
    [
        ("read by the host", 64, 0, {"max_batch_tokens": 1, "capacity": 0}),
        ("on the device", 9, 0, {"max_batch_tokens": 7}),
        ("read by the host", 9, 16, {}),
        ("on the device", 9, 16, {"capacity": 4, "max_batch_tokens": 20}),
    ],
    ids=["token by token", "computed again in chunks", "restored", "restored in chunks, far ahead"],
)
def test_embeddings_give_the_bits_of_their_tokens_in_any_batch_and_after_preemption(
    kind: str, num_pages: int, num_host_pages: int, settings: dict[str, int], tmp_path: Path
) -> None:
    """Other sequences share the steps. If pages are short, sequences are preempted and recomputed or restored."""
    forward_pass = load(num_host_pages=num_host_pages, kv_dtype="q8_0", deterministic=True)
    link = make_link(kind, tmp_path, forward_pass)
    bench = stepped(forward_pass, link, num_pages, num_host_pages=num_host_pages, **settings)
    bench.submit(list(prompts((30,), seed=9)[0]), 40, request_id=50)
    bench.turn()
    bench.submit(list(PROMPT), NUM_BITS, request_id=1, sampling=DRAWN)
    link.submit(looked_up(PROMPT), NUM_BITS, 2, sampling=DRAWN, num_logits=NUM_BITS)
    link.submit(random_rows(17, 6), 12, 51)
    bench.run_dry()
    assert bits(bench.received(1)) == bits_of_tokens_alone()
    assert bits(bench.received(2)) == bits_of_tokens_alone()
    log_softmax = torch.tensor(link.logits[2]).log_softmax(1)
    for row, token, reported in zip(log_softmax, bench.received(2).token_ids, bench.received(2).logprobs, strict=True):
        assert reported is not None
        assert abs(row[token].item() - reported.logprob) < 1e-4
    is_short = num_pages == 9
    assert (bench.received(1).num_preemptions + bench.received(2).num_preemptions > 0) == is_short
    assert (bench.board.pages_restored > 0) == (num_host_pages > 0)
    close(bench, link)


# ---- Faults ----


@pytest.mark.parametrize("capacity", [0, 1, 4])
def test_bad_logits_invalidate_the_host_pages_of_their_tenant_only(capacity: int, tmp_path: Path) -> None:
    forward_pass = load(num_host_pages=16)
    link = make_link("on the device", tmp_path, forward_pass)
    bench = stepped(forward_pass, link, 9, capacity=capacity)
    shared = {b"one": list(prompts((40,), seed=1)[0]), b"two": list(prompts((40,), seed=2)[0])}
    ids = iter(range(100))

    def ask(salt: bytes, count: int) -> Received:
        request_id = next(ids)
        bench.submit(shared[salt], count, request_id=request_id, salt=salt)
        bench.run_dry()
        return bench.received(request_id)

    def move_to_host() -> None:
        """Run sequences that need all pages."""
        for seed in range(2):
            bench.submit(list(prompts((100,), seed=30 + seed)[0]), 40, request_id=next(ids), salt=b"big")
            bench.run_dry()

    for salt in (b"one", b"two") * 2:  # a page is worth keeping once it has been found
        expect_transformers(looked_up(shared[salt]), ask(salt, 3), 3)
    move_to_host()
    num_kept = bench.board.host_pages_used
    assert num_kept >= 4
    # Prompt embeddings belong to one request, so bad ones invalidate nothing else.
    bad = random_rows(30, 1)
    bad[25, 3] = np.inf
    link.submit(bad, 5, 200, salt=b"one")
    bench.run_dry()
    assert bench.received(200).finishes == [Finish.FAILED]
    assert bench.board.host_pages_used == num_kept
    bench.submit(shared[b"one"], 20, request_id=201, salt=b"one")
    while len(bench.received(201).token_ids) < 4:
        bench.turn()
    assert bench.board.pages_restored == 2
    ((sequence, _),) = bench.requests.table.of_frontend(1)
    with torch.inference_mode():
        forward_pass._ops.pages[:, sequence.kv.pages[0]] = 0xFF  # NaN in every number
    bench.run_dry()
    assert bench.received(201).finishes == [Finish.FAILED]
    assert bench.board.host_pages_used == num_kept - 2
    again = ask(b"one", 5)
    expect_transformers(looked_up(shared[b"one"]), again, 5)
    assert again.started is not None
    assert again.started.cached_tokens == 0
    other = ask(b"two", 5)
    expect_transformers(looked_up(shared[b"two"]), other, 5)
    assert other.started is not None
    assert other.started.cached_tokens >= 32
    assert bench.board.pages_restored == 4
    close(bench, link)


def raise_device_error(*_args: Any) -> Any:
    raise DeviceError("cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE (1)")


@pytest.mark.parametrize(
    ("kind", "is_late", "capacity", "num_pages"),
    [
        (KINDS[0], False, 0, 12),
        (KINDS[1], True, 1, 11),
        (KINDS[2], True, 1, 11),
        (KINDS[1], False, 4, 12),
        (KINDS[2], False, 4, 12),
    ],
)
def test_bisection_of_a_step_with_restores_fails_only_the_bad_row(
    kind: str, *, is_late: bool, capacity: int, num_pages: int, tmp_path: Path
) -> None:
    """The row fails because its embeddings cannot be read; if late, only after the forward pass, in sampling."""
    forward_pass = load(num_host_pages=16)
    link = make_link(kind, tmp_path, forward_pass)
    bench = stepped(forward_pass, link, num_pages, capacity=capacity)
    guilty, failed = [], []
    run, sample = forward_pass.forward, forward_pass.sample

    def is_guilty(batch: StepBatch) -> bool:
        return any(given.values.loan in guilty for given in batch.embeddings)  # type: ignore[attr-defined]

    def forward(batch: StepBatch) -> Any:
        failed.extend([batch] * is_guilty(batch))
        return run(batch)

    def fail_late(logits: Any, batch: StepBatch, masks: Any = None) -> Any:
        if is_late and is_guilty(batch):
            raise RuntimeError("planted")
        return sample(logits, batch, masks)

    forward_pass.forward, forward_pass.sample = forward, fail_late  # type: ignore[method-assign]
    submit_all(bench, link)
    bench.turn()
    while any(request.subscriber.request_id < 100 for request in bench.requests.table.of_frontend(1)):
        if not guilty or not guilty[-1]._is_open:
            loan = link.submit(random_rows(3, 50), 4, 100 + len(guilty))
            guilty.append(loan)
            if not is_late:
                loan.read_rows = loan.copy_rows = raise_device_error  # type: ignore[method-assign]
        bench.turn()
    bench.run_dry()
    expect_all(bench)
    assert any(len(batch.page_restores) and batch.num_rows > 1 for batch in failed)
    for number in range(len(guilty)):
        assert bench.received(100 + number).finishes == [Finish.FAILED]
    close(bench, link)


def test_a_lost_device_releases_all_loans_and_host_pages_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that cannot be unlocked or freed is left to the driver, because the process ends."""
    forward_pass = load(num_host_pages=16)
    link = make_link(kind, tmp_path, forward_pass)
    bench = AheadBench(forward_pass, 9, 4, 16, link)
    submit_all(bench, link)
    while bench.board.pages_saved == 0:
        assert bench.requests.table.num_open or link.arrivals
        bench.turn()
    link.submit(random_rows(20, 8), 5, 8)
    forward_pass.device.fault = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(ExecutorFailed, match="the device is lost"):  # in a step, or while pages are saved
        bench.run_dry()
    expect_all(bench, unfinished=[*embedded(), *TOKENS])
    link.close()
    assert (link.exporter.held_bytes, link.num_lent) == (0, 0)
    messages = {
        "read by the host": "",
        "page-locked": "cannot unlock the pages of",
        "on the device": "cannot free a shared buffer on the GPU",
    }
    expected = messages[kind]
    assert expected in caplog.text
    assert ("shared" in caplog.text) == bool(expected)
    with pytest.raises(ExecutorFailed, match=r"the device is lost|has died"):
        bench.threads.close()
    bench.board.close()
