"""Prompts that clients hand in as embeddings, through the real engine, link and client."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.backend.buffers.options import make_exporter
from penstock.backend.buffers.shared_prompts import SharedPromptRows
from penstock.backend.engine.batch_builder import keep_rows
from penstock.backend.forward_pass import FROM_EMBEDDINGS, EmbeddedTokens, IBatchedForwardPass, StepBatch
from penstock.backend.main import DEMO_MODEL_DIR
from penstock.backend.passes.fake import FakePass, embedded_token
from penstock.backend.scheduling.step_plan import Plan
from penstock.shm.client import BackendClient, BufferSlice, GenerationRequest, SharedBuffer, TokenStream
from penstock.shm.link.events import Submission
from penstock.shm.messages import (
    BufferContent,
    BufferKind,
    BufferRef,
    BufferRequest,
    Constraints,
    ContentSpec,
    FailureCode,
    Finish,
    Sampling,
    Submit,
)
from penstock.tools.gpu_check.checks.pass_agreement import RowsOnHost
from tests.backend.buffers.test_shared_outputs import NUM_PAGES, PAGE, VOCAB, DeviceFakePass, decoder, fake
from tests.backend.harness import Bench, expected_tokens
from tests.backend.served import connected, generate, served
from tests.checkpoints import load_oracle
from tests.shm.buffers.fake_device import FakeDevice

GREEDY = Sampling(temperature=0.0)
EMBEDDINGS = BufferContent.PROMPT_EMBEDDINGS
CONTEXT = NUM_PAGES * PAGE


def random_rows(num_rows: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(num_rows, FakePass.embedding_size)).astype(np.float32)


def fakes_tokens(rows: NDArray[np.float32], count: int, vocab_size: int = VOCAB) -> list[int]:
    """What the fake pass generates greedily after these embeddings, by its definition."""
    return expected_tokens([embedded_token(row) for row in rows], count, vocab_size)


def hand_in(buffer: SharedBuffer, rows: NDArray[np.float32]) -> BufferSlice:
    buffer.view()[: rows.nbytes] = rows.tobytes()
    return BufferSlice(buffer, EMBEDDINGS, len(rows))


async def finished(stream: TokenStream) -> tuple[list[int], Finish, FailureCode | None]:
    batches = [batch async for batch in stream]
    return [token for batch in batches for token in batch.token_ids], batches[-1].finish, batches[-1].failure


async def test_in_a_crowd_that_is_preempted_and_chunked_each_gets_its_own_tokens() -> None:
    with served(fake) as path:
        async with connected(path, BufferRequest(6, 1 << 12)) as client:
            prompts = [random_rows(length, length) for length in (1, 2, 13, 30, 41)]
            output = client.take_buffer()
            crowd = [client.submit(GenerationRequest([number] * 4, 40, GREEDY)) for number in range(2)]
            asked = []
            for number, rows in enumerate(prompts):
                logits = BufferSlice(output, BufferContent.LOGITS, 4) if number == 3 else None
                part = hand_in(client.take_buffer(), rows)
                asked.append(client.submit(GenerationRequest(part, 12, GREEDY, may_share=True, output=logits)))
            answers = await asyncio.gather(*map(finished, asked + crowd))
            for rows, (tokens, finish, _) in zip(prompts, answers, strict=False):
                assert (tokens, finish) == (fakes_tokens(rows, 12), Finish.LENGTH)
            for number, (tokens, _, _) in enumerate(answers[len(asked) :]):
                assert tokens == expected_tokens([number] * 4, 40, VOCAB)
            assert np.asarray(output.rows()).reshape(4, -1).argmax(1).tolist() == answers[3][0][:4]
            assert any(stream.num_preemptions for stream in asked)


@cache
def oracle() -> Any:
    return load_oracle(DEMO_MODEL_DIR)


def looked_up(tokens: list[int]) -> NDArray[np.float32]:
    """What the demo model's table gives for them."""
    with torch.inference_mode():
        rows: NDArray[np.float32] = oracle().get_input_embeddings()(torch.tensor(tokens)).numpy()
    return rows


async def test_embeddings_of_tokens_give_what_the_tokens_and_transformers_give() -> None:
    tokens = [[3, 1, 4, 1, 5, 9, 2, 6], [271], list(range(50, 77))]
    drawn = Sampling(temperature=1.0, top_p=0.9, seed=7, repetition_penalty=1.0)
    with served(decoder) as path:
        async with connected(path, BufferRequest(3, 1 << 16)) as client:
            buffers = [client.take_buffer() for _ in tokens]
            for sampling in (GREEDY, drawn):
                streams = [generate(client, GenerationRequest(each, 8, sampling)) for each in tokens]
                streams += [
                    generate(client, GenerationRequest(hand_in(buffer, looked_up(each)), 8, sampling))
                    for buffer, each in zip(buffers, tokens, strict=True)
                ]
                answers = await asyncio.gather(*streams)
                assert answers[: len(tokens)] == answers[len(tokens) :]
                if sampling is not GREEDY:
                    continue
                for prompt, generated in zip(tokens, answers, strict=False):
                    with torch.inference_mode():
                        rows = torch.from_numpy(looked_up(prompt + generated))[None]
                        logits = oracle()(inputs_embeds=rows).logits[0, len(prompt) - 1 : -1]
                    assert generated == logits.argmax(1).tolist()


async def test_penalties_count_no_token_of_embeddings() -> None:
    """At the first token nothing is generated yet: what a penalty there knows is the prompt's tokens."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    repeated = Sampling(temperature=0.0, repetition_penalty=50.0, frequency_penalty=1.0, num_logprobs=0)
    with served(decoder) as path:
        async with connected(path, BufferRequest(1, 1 << 16)) as client:
            part = hand_in(client.take_buffer(), looked_up(prompt))
            (first,) = await generate(client, GenerationRequest(part, 1, repeated))
            assert [first] == await generate(client, GenerationRequest(prompt, 1, GREEDY))
            with_penalties = await generate(client, GenerationRequest(part, 8, repeated))
            assert len(set(with_penalties)) == 8


async def test_lists_of_tokens_and_log_probabilities_are_of_what_is_generated() -> None:
    with served(fake) as path:
        async with connected(path, BufferRequest(1, 1 << 12)) as client:
            part = hand_in(client.take_buffer(), random_rows(9))
            sampling = Sampling(temperature=0.0, num_logprobs=2)
            allowed = Constraints(allowed_token_ids=(5, 6), min_tokens=3)
            stream = client.submit(GenerationRequest(part, 5, sampling, (5,), constraints=allowed))
            batches = [batch async for batch in stream]
            tokens = [token for batch in batches for token in batch.token_ids]
            assert tokens[:3] == [6, 6, 6]
            assert set(tokens) <= {5, 6}
            told = [entry for batch in batches for entry in batch.logprobs or ()]
            assert len(told) == len(tokens)


async def test_values_that_are_no_numbers_end_their_own_request_alone() -> None:
    bad = looked_up([3, 1, 4, 1, 5, 9, 2, 6]).copy()
    bad[2, 5] = np.inf
    prompt = [2, 7, 1, 8, 2, 8]
    with served(decoder) as path:
        async with connected(path, BufferRequest(1, 1 << 16)) as client:
            part = hand_in(client.take_buffer(), bad)
            await generate(client, GenerationRequest([*prompt, 1], 1, GREEDY))
            spoilt = client.submit(GenerationRequest(part, 8, GREEDY))
            beside = client.submit(GenerationRequest(prompt, 8, GREEDY))
            assert await finished(spoilt) == ([], Finish.FAILED, FailureCode.INTERNAL)
            tokens, finish, _ = await finished(beside)
            assert finish is Finish.LENGTH
            for salt in (b"", b"x"):
                again = client.submit(GenerationRequest(prompt, 8, GREEDY, salt=salt))
                assert (await finished(again))[0] == tokens
                assert (again.cached_tokens > 0) == (salt == b""), "what the tenant had computed is found as before"


async def test_nothing_that_was_computed_of_embeddings_is_found_by_another() -> None:
    """The buffer is rewritten as soon as it is back: neither equal embeddings nor any others see what was before."""
    one, other = random_rows(17, 1), random_rows(17, 2)
    with served(fake) as path:
        async with connected(path, BufferRequest(3, 1 << 12)) as client:
            buffer = client.take_buffer()
            for rows in (one, other, one):
                stream = client.submit(GenerationRequest(hand_in(buffer, rows), 6, GREEDY))
                assert (await finished(stream))[0] == fakes_tokens(rows, 6)
                assert stream.cached_tokens == 0
            streams = [
                client.submit(GenerationRequest(hand_in(each, one), 6, GREEDY, may_share=True))
                for each in (buffer, client.take_buffer(), client.take_buffer())
            ]
            for tokens, _, _ in await asyncio.gather(*map(finished, streams)):
                assert tokens == fakes_tokens(one, 6)
            assert [(stream.cached_tokens, stream.is_coalesced) for stream in streams] == [(0, False)] * 3


async def test_more_embeddings_than_the_context_are_rejected_with_the_limit_and_come_back() -> None:
    with served(fake) as path:
        async with connected(path, BufferRequest(1, 1 << 12)) as client:
            buffer = client.take_buffer()
            for num_rows, is_fine in ((CONTEXT + 1, False), (CONTEXT - 1, True), (CONTEXT, True)):
                stream = client.submit(GenerationRequest(hand_in(buffer, random_rows(num_rows)), 3, GREEDY))
                batches = [batch async for batch in stream]
                if is_fine:
                    tokens = [token for batch in batches for token in batch.token_ids]
                    assert tokens == fakes_tokens(random_rows(num_rows), CONTEXT - num_rows)
                else:
                    (last,) = batches
                    expected = Finish.REJECTED, FailureCode.CONTEXT_TOO_LONG, CONTEXT
                    assert (last.finish, last.failure, last.failure_limit) == expected


async def close_in_the_middle(client: BackendClient, num_tokens: int) -> None:
    parts = [hand_in(client.take_buffer(), random_rows(20 + number, number)) for number in range(2)]
    streams = [client.submit(GenerationRequest(part, 60, GREEDY)) for part in parts]
    for _ in range(num_tokens):
        await anext(streams[0])


async def test_clients_that_go_away_in_the_middle_leave_nothing_behind_and_others_go_on() -> None:
    with served(fake) as path:
        async with connected(path, BufferRequest(1, 1 << 12)) as staying:
            part = hand_in(staying.take_buffer(), random_rows(11))
            for number in range(8):
                async with connected(path, BufferRequest(2, 1 << 12)) as client:
                    await close_in_the_middle(client, number % 3)
                assert await generate(staying, GenerationRequest(part, 7, GREEDY)) == fakes_tokens(random_rows(11), 7)


async def test_a_cancelled_request_gives_its_embeddings_back_and_the_buffer_serves_again() -> None:
    with served(fake) as path:
        async with connected(path, BufferRequest(1, 1 << 12)) as client:
            for number in range(12):
                async with asyncio.timeout(10):
                    while not client.num_free_buffers:  # noqa: ASYNC110 - the backend brings it about
                        await asyncio.sleep(0.001)
                buffer = client.take_buffer()
                stream = client.submit(GenerationRequest(hand_in(buffer, random_rows(33, number)), 40, GREEDY))
                for _ in range(number % 4):
                    await anext(stream)
                stream.cancel()
                buffer.release()


async def test_on_a_device_embeddings_never_touch_the_host(tmp_path: Path) -> None:
    device, clients_device = FakeDevice(tmp_path), FakeDevice(tmp_path)
    passes = []

    def load() -> IBatchedForwardPass:
        passes.append(DeviceFakePass(device))
        passes[0].create_cache(NUM_PAGES, PAGE, "fp32")
        return passes[0]

    prompts = [random_rows(length, length) for length in (1, 13, 30)]
    with served(load, "cuda", device) as path:
        async with connected(path, BufferRequest(3, 1 << 12, (BufferKind.CUDA,)), clients_device) as client:
            for _ in range(2):
                streams = [generate(client, GenerationRequest([number] * 20, 20, GREEDY)) for number in range(3)]
                buffers = [client.take_buffer() for _ in prompts]
                for buffer, rows in zip(buffers, prompts, strict=True):
                    clients_device.poke(buffer.device_view().__cuda_array_interface__["data"][0], rows.tobytes())
                    part = BufferSlice(buffer, EMBEDDINGS, len(rows))
                    streams.append(generate(client, GenerationRequest(part, 12, GREEDY)))
                answers = await asyncio.gather(*streams)
                assert answers[3:] == [fakes_tokens(rows, 12) for rows in prompts]
                for buffer in buffers:
                    buffer.release()
        async with asyncio.timeout(20):
            while device.num_allocated > 1:  # noqa: ASYNC110 - the engine's thread hears the farewell
                await asyncio.sleep(0.002)
    assert passes[0].num_host_copies == 0
    assert (device.num_allocated, clients_device.num_opened) == (0, 0)


def test_they_are_offered_where_the_pass_takes_them() -> None:
    class TakesNone(FakePass):
        embedding_size = property()  # type: ignore[assignment]

    spec = ContentSpec(EMBEDDINGS, FakePass.embedding_size, "<f4")
    for kind, is_offered in ((FakePass, True), (TakesNone, False)):
        assert (spec in make_exporter("host", 1, kind(VOCAB, 1), None)._contents) is is_offered


def test_buffers_on_the_host_are_read_by_the_device_for_a_pass_that_has_its_outputs_there(tmp_path: Path) -> None:
    """Any other one is given rows by the host alone, whatever device there is."""
    device = FakeDevice(tmp_path)
    for forward_pass, device_reads in ((fake(), False), (DeviceFakePass(device), True)):
        exporter = make_exporter("host", 1 << 20, forward_pass, device)
        buffers = exporter.export(BufferRequest(1, 1 << 12), os.getpid())
        loan = buffers.borrow(BufferRef(0, 0, EMBEDDINGS, 1), to_backend=True)
        assert SharedPromptRows(loan, 0, 1).device_reads is device_reads
        assert bool(device.registered) is device_reads
        exporter.release_client(buffers, has_closed=True)
        forward_pass.close()
    assert (device.registered, device.num_allocated) == ({}, 0)


# On the bench: every step by hand


class StubLoan:
    """Rows as a `Loan` gives them, and how often each was read."""

    device_reads = False

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self.rows = rows
        self.num_reads: Counter[int] = Counter()

    def read_rows(self, first: int, num_rows: int) -> bytes:
        assert first + num_rows <= len(self.rows)
        self.num_reads.update(range(first, first + num_rows))
        return self.rows[first : first + num_rows].tobytes()


def submit_embedded(
    bench: Bench,
    rows: NDArray[np.float32],
    request_id: int = 0,
    max_tokens: int = 8,
    sampling: Sampling = GREEDY,
    **options: Any,
) -> StubLoan:
    loan = StubLoan(rows)
    submit = Submit(request_id, b"\0\0\0\0", len(rows), max_tokens, sampling, **options)
    bench.link.arrivals.append(Submission(1, submit, b"", embeddings=loan))  # type: ignore[arg-type]
    return loan


@pytest.fixture
def bench() -> Any:
    made = Bench()
    yield made
    made.close()


def test_a_preempted_sequence_finds_its_own_pages_and_reads_no_row_again(bench: Bench) -> None:
    rows = random_rows(26)
    loan = submit_embedded(bench, rows)
    while len(bench.received().token_ids) < 2:
        bench.turn()
    ((sequence, _),) = bench.requests._open[1].values()
    bench.scheduler._preempt(sequence)
    bench.run_dry()
    assert bench.received().token_ids == fakes_tokens(rows, 8, bench.vocab_size)
    assert loan.num_reads == Counter(range(26))


def test_a_preempted_sequence_whose_pages_went_to_others_reads_its_rows_again() -> None:
    bench = Bench(num_pages=12)
    rows = random_rows(20)
    bench.submit([1, 2, 3, 4], 36, request_id=9)
    loan = submit_embedded(bench, rows, max_tokens=24)
    bench.run_dry()
    assert bench.received().num_preemptions > 0
    assert bench.received().token_ids == fakes_tokens(rows, 24, bench.vocab_size)
    assert bench.received(9).token_ids == expected_tokens([1, 2, 3, 4], 36, bench.vocab_size)
    assert max(loan.num_reads.values()) > 1
    bench.close()


@pytest.mark.parametrize("num_host_pages", [0, 16])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_was_computed_of_embeddings_is_kept_no_longer_than_its_sequence_here_or_on_the_host(
    num_host_pages: int, *, is_cancelled: bool
) -> None:
    bench = Bench(num_pages=12, num_host_pages=num_host_pages)
    rows = random_rows(20)
    bench.submit([1, 2, 3, 4], 36, request_id=9)
    loan = submit_embedded(bench, rows, max_tokens=24)
    if is_cancelled:
        while not bench.received().num_preemptions or bench.board.host_pages_used < min(1, num_host_pages):
            bench.turn()
        bench.cancel()
    bench.run_dry()
    found = bench.received().token_ids
    assert found == fakes_tokens(rows, 24, bench.vocab_size)[: len(found)]
    assert bench.received().num_preemptions > 0
    if not is_cancelled:
        assert (max(loan.num_reads.values()) > 1) == (num_host_pages == 0), "computed again, or else restored"
    assert bench.board.host_pages_used == 0
    num_saved = bench.board.pages_saved
    assert (num_saved > 0) == (num_host_pages > 0)
    for number in range(3):  # these need all pages
        bench.submit([number, *range(9, 30)], 24, request_id=20 + number)
        bench.run_dry()
    assert bench.board.pages_saved == num_saved
    bench.close()


@pytest.mark.parametrize("cancelled", [0, 1, 2])
@pytest.mark.parametrize("turns", range(6))
def test_a_row_that_is_dropped_as_its_step_begins_moves_the_others_embeddings(
    bench: Bench, cancelled: int, turns: int
) -> None:
    prompts = [random_rows(length, length) for length in (9, 5, 14)]
    bench.submit([1, 2, 3], 20, request_id=9)
    for number, rows in enumerate(prompts):
        submit_embedded(bench, rows, number)
    for _ in range(turns):
        bench.turn()
    bench.cancel(cancelled)
    bench.engine.turn()  # before the planned step begins
    bench.run_dry()
    for number, rows in enumerate(prompts):
        tokens = fakes_tokens(rows, 8, bench.vocab_size)
        found = bench.received(number).token_ids
        assert found == (tokens[: len(found)] if number == cancelled else tokens)
    assert bench.received(9).token_ids == expected_tokens([1, 2, 3], 20, bench.vocab_size)


def test_kept_rows_keep_their_embeddings_at_their_new_places() -> None:
    x = FROM_EMBEDDINGS
    given = {1: random_rows(1, 1), 2: random_rows(2, 2), 7: random_rows(3, 3)}
    batch = StepBatch(
        input_ids=np.array([5, x, x, x, 6, 7, 8, x, x, x], np.int32),
        query_starts=np.array([0, 1, 2, 5, 7, 10], np.int32),
        context_lens=np.zeros(5, np.int32),
        page_table=np.zeros((5, 1), np.int32),
        slots=np.arange(5, dtype=np.int32),
        logit_rows=np.arange(5, dtype=np.int32),
        embeddings=tuple(EmbeddedTokens(first, RowsOnHost(rows)) for first, rows in given.items()),
    )
    for number in range(1, 32):
        kept = [row for row in range(5) if number >> row & 1]
        left = keep_rows(batch, kept, Plan())
        places = [place for part in left.embeddings for place in range(part.first, part.first + part.values.num_rows)]
        assert np.flatnonzero(left.input_ids == x).tolist() == places
        expected = [given[first] for first, row in ((1, 1), (2, 2), (7, 4)) if row in kept]
        for part, rows in zip(left.embeddings, expected, strict=True):
            np.testing.assert_array_equal(part.values.read(), rows)


def test_rows_are_those_of_the_loan_from_the_chunks_start_on() -> None:
    rows = random_rows(7)
    part = SharedPromptRows(StubLoan(rows), 2, 4)  # type: ignore[arg-type]
    np.testing.assert_array_equal(part.read(), rows[2:6])
    assert not part.device_reads
