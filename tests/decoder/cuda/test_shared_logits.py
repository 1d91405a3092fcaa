"""The CUDA pass's logits in clients' buffers, through the real engine; kernels and device are emulated."""

from __future__ import annotations

import asyncio
import ctypes
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shm.client import BufferSlice, GenerationRequest
from shm.wire import BufferContent, BufferKind, BufferWish, Sampling
from tests.backend.served import connected, generate, served
from tests.decoder.cuda.tiny_models import VOCAB_SIZE, make_pass, oracle_logits, prompts
from tests.shm.fake_device import FakeDevice

if TYPE_CHECKING:
    from pathlib import Path

    from backend.forward_pass import IBatchedForwardPass

NUM_PAGES, PAGE_SIZE, NUM_ROWS = 16, 16, 3


class EmulatorsMemory(FakeDevice):
    """The fake device, where memory of the emulator, which is this process's, is device memory too."""

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        assert stream == 0  # the emulator's, which is done with all that it was given
        self.poke(destination, ctypes.string_at(source, num_bytes))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
async def test_clients_get_the_passes_logits_on_the_device(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> IBatchedForwardPass:
        forward_pass = make_pass(dtype=dtype)
        monkeypatch.setattr(forward_pass, "host_logits", None)  # nothing goes through the host
        forward_pass.create_cache(NUM_PAGES, PAGE_SIZE, "fp32")
        return forward_pass

    device, clients_device = EmulatorsMemory(tmp_path), FakeDevice(tmp_path)
    wish = BufferWish(2, NUM_ROWS * 4 * VOCAB_SIZE, (BufferKind.CUDA,))
    with served(load, "cuda", device, num_pages=NUM_PAGES, page_size=PAGE_SIZE) as path:
        async with connected(path, wish, clients_device) as client:
            asked = [(prompt, client.take_buffer()) for prompt in prompts((7, 17))]
            streams = [
                generate(
                    client,
                    GenerationRequest(
                        prompt,
                        5,
                        Sampling(temperature=0.0),
                        output=BufferSlice(buffer, BufferContent.LOGITS, NUM_ROWS),
                    ),
                )
                for prompt, buffer in asked
            ]
            for (prompt, buffer), tokens in zip(asked, await asyncio.gather(*streams), strict=True):
                rows = buffer.device_rows().__cuda_array_interface__
                assert (rows["shape"], rows["typestr"]) == ((NUM_ROWS, VOCAB_SIZE), "<f4")
                data = clients_device.read(rows["data"][0], NUM_ROWS * 4 * VOCAB_SIZE)
                logits = np.frombuffer(data, np.float32).reshape(NUM_ROWS, VOCAB_SIZE)
                assert logits.argmax(1).tolist() == tokens[:NUM_ROWS]
                expected = oracle_logits("llama3", [*prompt, *tokens[: NUM_ROWS - 1]])[-NUM_ROWS:]
                error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
                assert error < (1e-4 if dtype == "fp32" else 0.05)
                buffer.release()
