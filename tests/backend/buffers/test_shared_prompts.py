"""Prompts that clients give as embeddings, through the real engine, link and client."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backend.buffers import SharedPromptRows, make_exporter
from penstock.backend.forward_pass import IBatchedForwardPass
from penstock.backend.model_names import DEMO_MODEL_DIR
from penstock.backend.passes.fake import FakePass
from penstock.shm.client import BackendClient, BufferSlice, GenerationRequest, SharedBuffer, TokenStream
from penstock.shm.messages import (
    BufferContent,
    BufferKind,
    BufferRef,
    BufferRequest,
    Constraints,
    FailureCode,
    Finish,
    Sampling,
)
from tests.backend.buffers.embedded_prompts import GREEDY, fakes_tokens, random_rows
from tests.backend.buffers.test_shared_outputs import NUM_PAGES, PAGE, VOCAB, DeviceFakePass, decoder, fake
from tests.backend.harness import expected_tokens
from tests.backend.served import connected, generate, served
from tests.checkpoints import load_oracle
from tests.shm.buffers.fake_device import FakeDevice

EMBEDDINGS = BufferContent.PROMPT_EMBEDDINGS
CONTEXT = NUM_PAGES * PAGE


def hand_in(buffer: SharedBuffer, rows: NDArray[np.float32]) -> BufferSlice:
    buffer.view()[: rows.nbytes] = rows.tobytes()
    return BufferSlice(buffer, EMBEDDINGS, len(rows))


async def finished(stream: TokenStream) -> tuple[list[int], Finish, FailureCode | None]:
    batches = [batch async for batch in stream]
    return [token for batch in batches for token in batch.token_ids], batches[-1].finish, batches[-1].failure


async def test_embeddings_get_their_own_tokens_in_a_busy_preempted_batch() -> None:
    with served(fake) as path:
        async with connected(path, BufferRequest(6, 1 << 12)) as client:
            prompts = [random_rows(length, length) for length in (1, 2, 13, 30, 41)]
            output = client.take_buffer()
            others = [client.submit(GenerationRequest([number] * 4, 40, GREEDY)) for number in range(2)]
            embedded = []
            for number, rows in enumerate(prompts):
                logits = BufferSlice(output, BufferContent.LOGITS, 4) if number == 3 else None
                part = hand_in(client.take_buffer(), rows)
                embedded.append(client.submit(GenerationRequest(part, 12, GREEDY, may_share=True, output=logits)))
            answers = await asyncio.gather(*map(finished, embedded + others))
            for rows, (tokens, finish, _) in zip(prompts, answers, strict=False):
                assert (tokens, finish) == (fakes_tokens(rows, 12), Finish.LENGTH)
            for number, (tokens, _, _) in enumerate(answers[len(embedded) :]):
                assert tokens == expected_tokens([number] * 4, 40, VOCAB)
            assert np.asarray(output.rows()).reshape(4, -1).argmax(1).tolist() == answers[3][0][:4]
            assert any(stream.num_preemptions for stream in embedded)


@cache
def oracle() -> Any:
    return load_oracle(DEMO_MODEL_DIR)


def looked_up(tokens: list[int]) -> NDArray[np.float32]:
    """The rows of the demo model's embedding table."""
    with torch.inference_mode():
        rows: NDArray[np.float32] = oracle().get_input_embeddings()(torch.tensor(tokens)).numpy()
    return rows


async def test_embeddings_of_tokens_give_the_same_text_as_the_tokens() -> None:
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


async def test_penalties_do_not_count_embeddings() -> None:
    """Nothing is generated before the first token, so only prompt tokens could be penalised there."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    repeated = Sampling(temperature=0.0, repetition_penalty=50.0, frequency_penalty=1.0, num_logprobs=0)
    with served(decoder) as path:
        async with connected(path, BufferRequest(1, 1 << 16)) as client:
            part = hand_in(client.take_buffer(), looked_up(prompt))
            (first,) = await generate(client, GenerationRequest(part, 1, repeated))
            assert [first] == await generate(client, GenerationRequest(prompt, 1, GREEDY))
            with_penalties = await generate(client, GenerationRequest(part, 8, repeated))
            assert len(set(with_penalties)) == 8


async def test_token_lists_and_logprobs_apply_to_generated_tokens_after_embeddings() -> None:
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
            entries = [entry for batch in batches for entry in batch.logprobs or ()]
            assert len(entries) == len(tokens)


async def test_embeddings_that_are_not_finite_fail_only_their_own_request() -> None:
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


async def test_pages_computed_from_embeddings_are_never_reused() -> None:
    """The buffer is rewritten as soon as it is free: later embeddings, equal or not, see nothing of earlier ones."""
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


async def test_embeddings_beyond_the_context_are_rejected_with_the_limit() -> None:
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


async def test_clients_that_disconnect_mid_stream_leave_nothing_behind() -> None:
    with served(fake) as path:
        async with connected(path, BufferRequest(1, 1 << 12)) as staying:
            part = hand_in(staying.take_buffer(), random_rows(11))
            for number in range(8):
                async with connected(path, BufferRequest(2, 1 << 12)) as client:
                    await close_in_the_middle(client, number % 3)
                assert await generate(staying, GenerationRequest(part, 7, GREEDY)) == fakes_tokens(random_rows(11), 7)


async def test_cancelled_request_frees_its_embeddings_for_the_next_one() -> None:
    with served(fake) as path:
        async with connected(path, BufferRequest(1, 1 << 12)) as client:
            for number in range(12):
                async with asyncio.timeout(10):
                    while not client.num_free_buffers:  # noqa: ASYNC110 - the backend changes it
                        await asyncio.sleep(0.001)
                buffer = client.take_buffer()
                stream = client.submit(GenerationRequest(hand_in(buffer, random_rows(33, number)), 40, GREEDY))
                for _ in range(number % 4):
                    await anext(stream)
                stream.cancel()
                buffer.release()


async def test_device_embeddings_are_never_copied_to_the_host(tmp_path: Path) -> None:
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
            while device.num_allocated > 1:  # noqa: ASYNC110 - the engine's thread handles the disconnect
                await asyncio.sleep(0.002)
    assert passes[0].num_host_copies == 0
    assert (device.num_allocated, clients_device.num_opened) == (0, 0)


def test_embeddings_are_offered_only_if_the_pass_takes_them() -> None:
    forward_pass = FakePass(VOCAB, 1)
    for size in (4, 0):
        forward_pass.spec = replace(forward_pass.spec, embedding_size=size)
        contents = make_exporter("host", 1, forward_pass, None)._contents
        assert [spec.num_values for spec in contents if spec.content is EMBEDDINGS] == [size] * (size > 0)


def test_device_reads_host_buffers_only_for_a_pass_with_device_outputs(tmp_path: Path) -> None:
    """Other passes receive rows on the host only, even if there is a device."""
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
