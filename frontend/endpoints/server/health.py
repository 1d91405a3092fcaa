"""GET /health, GET /ready and GET /version: whether this server is alive, whether it can answer, and what it is."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from urllib.parse import parse_qs

import msgspec

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.generation.models.served_model import ModelKeeper
from penstock.frontend.transport.errors import ErrorKind, retry_later, shorten, shutting_down
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.client import backends_of
from penstock.shm.memory.model_table import ModelState

VERSION = importlib.metadata.version("penstock")
READY_PATH = "/ready"
_SHOWN_COUNTERS = ("running", "waiting", "pages_used", "pages_total")


async def health(exchange: Exchange, _context: EndpointContext) -> None:
    """GET /health: the process is alive, whatever the backend does."""
    await exchange.respond(200, b'{"status":"ok"}')


async def ready(exchange: Exchange, context: EndpointContext) -> None:
    """GET /ready: each model, or the one that the query names, can answer a request now. Raises ApiError."""
    if context.exchanges.is_draining:
        raise shutting_down()
    requested = parse_qs(exchange.query.decode("latin-1")).get("model")
    keepers = context.models.keepers if requested is None else (context.models.find("any", requested[0]),)
    for keeper in keepers:
        backend = keeper.backend
        if requested is None and keeper.waking is not None and keeper.waking.state is not ModelState.STARTING:
            continue  # a request would wake it
        if not backend.ready or keeper.current is None:
            what = "the backend is not connected or makes no progress" if not backend.ready else "its model is loading"
            known = keeper.name if backend.model is None else backend.model.model_id
            name = "" if known is None or len(context.models.keepers) == 1 else f"{shorten(known)}: "
            raise retry_later(ErrorKind.UNAVAILABLE, f"{name}{what}; retry later", backend.retry_after_s)
    answer = {"status": "ready"} | shown_counters(keepers)
    await exchange.respond(200, msgspec.json.encode(answer))


async def version(exchange: Exchange, _context: EndpointContext) -> None:
    """GET /version."""
    await exchange.respond(200, msgspec.json.encode({"version": VERSION}))


def shown_counters(keepers: Iterable[ModelKeeper]) -> dict[str, int]:
    """Return the sequences and pages of all these backends together; nothing when there is none."""
    totals: dict[str, int] = {}
    for keeper in keepers:
        for _, backend in backends_of(keeper.backend):
            counters = backend.backend_counters or {}
            for name in _SHOWN_COUNTERS:
                if name in counters:
                    totals[name] = totals.get(name, 0) + counters[name]
    return totals
