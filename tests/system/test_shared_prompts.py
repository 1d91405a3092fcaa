"""A client that gives prompts as embeddings to the real backend process; both sides die and recover."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backend.model_names import DEMO_MODEL_DIR
from penstock.shm.client import BackendClient, BufferSlice, GenerationRequest
from penstock.shm.messages import BufferContent, BufferRequest, Finish, Sampling
from tests.backend.served import connected, generate
from tests.checkpoints import load_oracle
from tests.system.processes import REPOSITORY, start_backend

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.shm.buffers.shared_buffers import SharedBuffer

BACKEND = ("--gpu", "none", "--dtype", "fp32", "--kv-budget", "64MB")
GREEDY = Sampling(temperature=0.0)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], list(range(50, 90)), [271]]
_DIES_IN_THE_MIDDLE = """
import asyncio, os, sys
from pathlib import Path
from penstock.shm.client import BufferSlice, GenerationRequest
from penstock.shm.messages import BufferContent, BufferRequest, Sampling
from tests.backend.served import connected

async def main():
    async with connected(Path(sys.argv[1]), BufferRequest(1, 1 << 16)) as client:
        part = BufferSlice(client.take_buffer(), BufferContent.PROMPT_EMBEDDINGS, 30)
        stream = client.submit(GenerationRequest(part, 2000, Sampling(temperature=0.0)))
        await anext(stream)
        os._exit(7)

asyncio.run(main())
"""


def hand_in(buffer: SharedBuffer, prompt: list[int], table: torch.nn.Embedding) -> BufferSlice:
    with torch.inference_mode():
        rows = table(torch.tensor(prompt)).numpy().astype(np.float32)
    buffer.view()[: rows.nbytes] = rows.tobytes()
    return BufferSlice(buffer, BufferContent.PROMPT_EMBEDDINGS, len(prompt))


async def until_ready(client: BackendClient) -> None:
    async with asyncio.timeout(30):
        while not client.ready:  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.02)


async def test_embeddings_survive_deaths_of_clients_and_of_the_backend(tmp_path: Path) -> None:
    oracle = load_oracle(DEMO_MODEL_DIR)
    table = oracle.get_input_embeddings()
    socket = tmp_path / "private" / "backend.sock"
    backend = start_backend(socket, *BACKEND)
    try:
        async with connected(socket, BufferRequest(len(PROMPTS), 1 << 16)) as client:
            for is_restarted in (False, True):
                parts = [hand_in(client.take_buffer(), prompt, table) for prompt in PROMPTS]
                inputs: list[list[int] | BufferSlice] = [*PROMPTS, *parts]
                answers = await asyncio.gather(*(generate(client, GenerationRequest(a, 12, GREEDY)) for a in inputs))
                assert answers[: len(PROMPTS)] == answers[len(PROMPTS) :]
                for prompt, answer in zip(PROMPTS, answers, strict=False):
                    with torch.inference_mode():
                        logits = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
                    assert answer == logits.argmax(1).tolist()
                if is_restarted:
                    break
                command = [sys.executable, "-c", _DIES_IN_THE_MIDDLE, str(socket)]
                died = await asyncio.to_thread(subprocess.run, command, cwd=REPOSITORY, timeout=60, check=False)
                assert died.returncode == 7
                assert await generate(client, GenerationRequest(parts[0], 12, GREEDY)) == answers[0]
                stream = client.submit(GenerationRequest(parts[1], 2000, GREEDY))
                await anext(stream)
                await asyncio.to_thread(backend.kill)
                backend.close()
                assert [batch async for batch in stream][-1].finish is Finish.FAILED
                backend = await asyncio.to_thread(start_backend, socket, *BACKEND)
                await until_ready(client)
        assert await asyncio.to_thread(backend.terminate) == 0
        assert "Traceback" not in backend.output
    finally:
        backend.close()
