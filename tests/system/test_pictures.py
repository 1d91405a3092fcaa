"""Pictures through a real backend: they survive its death in the tower, and nothing is held after a storm."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.passes.fake import FakeTower, embedded_token
from penstock.shm.client import BackendClient, GenerationRequest
from penstock.shm.messages import Picture, picture_digest, picture_token_ids
from tests.backend.harness import expected_tokens
from tests.shm.client.harness import GREEDY, connected, tokens_of, until
from tests.system.processes import Command, running, start_backend

if TYPE_CHECKING:
    from pathlib import Path

VOCAB_SIZE, GRID = 97, (1, 1, 1)


def start(tmp_path: Path) -> Command:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "vision_config": {}}))
    options = ("--forward-pass", "tests.passes:HeldTowerFakePass", "--max-running", "4", "--kv-budget", "1MB")
    return start_backend(tmp_path / "private" / "b.sock", "--model", str(tmp_path), *options)


def ask(seed: int, max_tokens: int = 8) -> tuple[GenerationRequest, list[int]]:
    """A request with two pictures, and the tokens that are due."""
    generator = random.Random(seed)
    tokens, known, pictures, pixels = [seed % 7], [seed % 7], [], []
    for size in (64 * 5, 64 * generator.randrange(1, 2000)):
        content = generator.randbytes(size)
        digest, count = picture_digest((size,), GRID, content), size // 64
        pictures.append(Picture(((len(tokens), count),), digest, (size,), GRID))
        pixels.append(content)
        tokens += [*picture_token_ids(digest, count), 3]
        rows = FakeTower().encode(np.frombuffer(content, np.uint8), GRID, lambda: None)
        known += [*map(embedded_token, rows), 3]
    request = GenerationRequest(tokens, max_tokens, GREEDY, pictures=tuple(pictures), pixels=tuple(pixels))
    return request, expected_tokens(known, max_tokens, VOCAB_SIZE)


async def use(client: BackendClient, seed: int) -> None:
    """Read a request to its end, or hang up."""
    request, due = ask(seed)
    stream = client.submit(request)
    if seed % 2:
        assert await tokens_of(stream) == due
    else:
        async for _ in stream:
            break
        stream.cancel()


async def test_pictures_survive_a_kill_in_the_tower_and_a_storm_leaves_nothing(tmp_path: Path) -> None:
    first = start(tmp_path)
    with running(first):
        async with connected(tmp_path / "private" / "b.sock") as client:
            requests = [ask(seed) for seed in range(3)]
            streams = [client.submit(request) for request, _ in requests]
            await asyncio.to_thread(first.wait_for, "encoding")
            first.process.kill()
            (tmp_path / "go").touch()
            second = await asyncio.to_thread(start, tmp_path)
            with running(second):
                assert [await tokens_of(stream) for stream in streams] == [due for _, due in requests]
                await asyncio.gather(*(use(client, seed) for seed in range(60)))
                await until(lambda: (client.backend_counters or {"pages_used": 1})["pages_used"] == 0)
