"""An engine in a thread behind its real link, for clients that use shared buffers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.backend.buffers import make_exporter
from penstock.backend.engine.requests.limits import EngineLimits
from penstock.backend.engine.steps.executor import Executor
from penstock.backend.forward_pass import IBatchedForwardPass
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.shm.buffers.device_api import DeviceApi
from penstock.shm.client import BackendClient, GenerationRequest
from penstock.shm.link.backend_link import BackendLink
from penstock.shm.memory.board import BackendBoard
from penstock.shm.memory.page_digest import PageDigestWriter, digest_bytes
from penstock.shm.messages import BufferRequest, ModelCard
from penstock.tools.engine_rig import EngineRig, RigSizes

MAX_RUNNING = 8


@contextmanager
def served(
    load: Callable[[], IBatchedForwardPass],
    choice: str = "auto",
    device: DeviceApi | None = None,
    *,
    num_pages: int = 24,
    page_size: int = 4,
) -> Iterator[Path]:
    """Run an engine in a thread. Yields the path of its socket."""
    executor = Executor(1)
    forward_pass = executor.start(load)
    board = BackendBoard.create(digest_bytes(num_pages))
    board.max_waiting = 100
    board.pid = os.getpid()  # else clients take the path for another backend's
    board.beat()
    card = ModelCard("m", "", 1, forward_pass.spec.vocab_size, num_pages * page_size, 100)
    with TemporaryDirectory(prefix="ps-") as directory:
        path = Path(directory) / "b.sock"
        exporter = make_exporter(choice, 64 << 20, forward_pass, device)
        link = BackendLink(path, card, board, exporter=exporter)
        pool = PagePool(num_pages, names=(digest := PageDigestWriter(board.behind, page_size)))
        sizes = RigSizes(num_pages=num_pages, page_size_tokens=page_size, max_running=MAX_RUNNING, max_batch_tokens=6)
        limits = EngineLimits(card.vocab_size, card.max_context_tokens, 100)
        engine = EngineRig(link, executor, sizes, limits, pool=pool, board=board).engine
        thread = threading.Thread(target=engine.run)
        thread.start()
        try:
            yield path
        finally:
            engine.drain(0.0)
            thread.join(30)
            link.close()
            executor.close()
            digest.close()
            board.close()
    assert not exporter.held_bytes


@asynccontextmanager
async def connected(
    path: Path, buffer_request: BufferRequest, device: DeviceApi | None = None
) -> AsyncIterator[BackendClient]:
    open_device = None if device is None else (lambda _uuid: device)
    client = BackendClient(path, buffers=buffer_request, open_device=open_device)
    await client.start()
    async with asyncio.timeout(20):
        while not client.ready:  # noqa: ASYNC110 - another thread brings it about
            await asyncio.sleep(0.002)
    yield client
    await client.close()


async def generate(client: BackendClient, request: GenerationRequest) -> list[int]:
    return [token for batch in [b async for b in client.submit(request)] for token in batch.token_ids]
