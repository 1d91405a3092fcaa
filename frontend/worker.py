"""One frontend process. Started by `frontend.main`, which owns the listening socket."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
from pathlib import Path

import msgspec
import uvloop

from frontend.app import App
from frontend.connections import raise_fd_limit
from frontend.model import ModelKeeper
from frontend.server import HttpServer
from frontend.settings import WORKER_SETTINGS_VARIABLE, WorkerSettings
from shm.client import BackendClient
from shm.log import set_up_logging


async def serve(settings: WorkerSettings) -> None:
    """Runs until a signal, drains, returns."""
    listening = socket.socket(fileno=settings.listen_fd)
    max_connections = raise_fd_limit()
    backend = BackendClient(Path(settings.socket_path))
    await backend.start()
    models = ModelKeeper(backend, settings.parsers)
    app = App(backend, models, api_keys=settings.api_keys, limits=settings.limits)
    keeper = asyncio.create_task(models.watch())
    try:
        server = HttpServer(app, listening, drain_timeout_s=settings.drain_timeout_s, max_connections=max_connections)
        await server.run()
    finally:
        keeper.cancel()
        await backend.close()


def main() -> None:
    encoded = os.environ.pop(WORKER_SETTINGS_VARIABLE, None)
    if encoded is None:
        sys.exit("frontend.worker is started by the frontend command")
    settings = msgspec.json.decode(encoded, type=WorkerSettings)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    handler = set_up_logging(settings.log_level, as_json=settings.log_json)
    # Said per request, and about what clients did: the request log and the error answers say it better.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    # What start-up made lives as long as the process: the collector need not walk it again.
    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    finally:
        handler.close()


if __name__ == "__main__":
    main()
