"""Logits in clients' buffers, and clients' embeddings as prompts, through the real engine and the emulated CUDA
pass."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.backend.buffers import SharedPromptRows
from penstock.shm.client import BufferSlice, GenerationRequest
from penstock.shm.messages import BufferContent, BufferKind, BufferRequest, Sampling
from tests.backend.passes.cuda.emulator_shared_device import EmulatorSharedDevice
from tests.backend.passes.cuda.tiny_models import VOCAB_SIZE, make_pass, oracle, oracle_logits, prompts
from tests.backend.served import connected, generate, served
from tests.shm.buffers.fake_device import FakeDevice

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.backend.forward_pass import IBatchedForwardPass

NUM_PAGES, PAGE_SIZE, NUM_ROWS = 16, 16, 3


def oracle_rows(content: BufferContent, tokens: Sequence[int]) -> NDArray[np.float32]:
    """[n, vocab or hidden]"""
    if content is BufferContent.LOGITS:
        return oracle_logits("llama3", tokens)
    with torch.inference_mode():
        states: NDArray[np.float32] = oracle("llama3").model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    return states


@pytest.mark.parametrize("content", [BufferContent.LOGITS, BufferContent.HIDDEN_STATES])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
async def test_clients_receive_rows_on_the_device(
    tmp_path: Path, dtype: str, content: BufferContent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> IBatchedForwardPass:
        forward_pass = make_pass(dtype=dtype)
        for name in ("host_logits", "host_hidden_states"):  # nothing goes through the host
            monkeypatch.setattr(forward_pass, name, lambda _logits: pytest.fail("read on the host"))
        forward_pass.create_cache(NUM_PAGES, PAGE_SIZE, "fp32")
        return forward_pass

    device, clients_device = EmulatorSharedDevice(tmp_path), FakeDevice(tmp_path)
    wish = BufferRequest(2, NUM_ROWS * 4 * VOCAB_SIZE, (BufferKind.CUDA,))
    with served(load, "cuda", device, num_pages=NUM_PAGES, page_size=PAGE_SIZE) as path:
        async with connected(path, wish, clients_device) as client:
            requests = [(prompt, client.take_buffer()) for prompt in prompts((7, 17))]
            streams = [
                generate(
                    client,
                    GenerationRequest(
                        prompt,
                        5,
                        Sampling(temperature=0.0),
                        output=BufferSlice(buffer, content, NUM_ROWS),
                    ),
                )
                for prompt, buffer in requests
            ]
            for (prompt, buffer), tokens in zip(requests, await asyncio.gather(*streams), strict=True):
                expected = oracle_rows(content, [*prompt, *tokens[: NUM_ROWS - 1]])[-NUM_ROWS:]
                rows = buffer.device_rows().__cuda_array_interface__
                assert (rows["shape"], rows["typestr"]) == (expected.shape, "<f4")
                data = clients_device.read(rows["data"][0], expected.nbytes)
                found = np.frombuffer(data, np.float32).reshape(expected.shape)
                if content is BufferContent.LOGITS:
                    assert found.argmax(1).tolist() == tokens[:NUM_ROWS]
                error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
                assert error < (1e-4 if dtype == "fp32" else 0.05)
                buffer.release()


@pytest.mark.parametrize("kind", [BufferKind.CUDA, BufferKind.HOST])
async def test_client_embeddings_give_the_results_of_their_tokens(
    tmp_path: Path, kind: BufferKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts run in chunks of at most six tokens, in the same steps as their tokens."""

    def load() -> IBatchedForwardPass:
        forward_pass = make_pass()
        forward_pass.create_cache(NUM_PAGES, PAGE_SIZE, "fp32")
        return forward_pass

    monkeypatch.setattr(SharedPromptRows, "read", lambda _rows: pytest.fail("read by the host, where the device can"))
    device, clients_device = EmulatorSharedDevice(tmp_path), FakeDevice(tmp_path)
    prompt_pair = prompts((7, 17))
    table = oracle("llama3").get_input_embeddings()
    greedy = Sampling(temperature=0.0)
    with served(load, "auto", device, num_pages=NUM_PAGES, page_size=PAGE_SIZE) as path:
        async with connected(path, BufferRequest(2, 1 << 13, (kind,)), clients_device) as client:
            streams = [generate(client, GenerationRequest(prompt, 5, greedy)) for prompt in prompt_pair]
            for prompt in prompt_pair:
                buffer = client.take_buffer()
                with torch.inference_mode():
                    rows: NDArray[np.float32] = table(torch.tensor(prompt)).numpy()
                if kind is BufferKind.CUDA:
                    clients_device.poke(buffer.device_view().__cuda_array_interface__["data"][0], rows.tobytes())
                else:
                    buffer.view()[: rows.nbytes] = rows.tobytes()
                part = BufferSlice(buffer, BufferContent.PROMPT_EMBEDDINGS, len(prompt))
                streams.append(generate(client, GenerationRequest(part, 5, greedy)))
            tokens = await asyncio.gather(*streams)
    assert tokens[:2] == tokens[2:]
    for prompt, generated in zip(prompt_pair, tokens, strict=False):
        assert generated == oracle_logits("llama3", [*prompt, *generated]).argmax(1)[len(prompt) - 1 : -1].tolist()
