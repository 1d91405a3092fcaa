"""GET /health, GET /ready and GET /version: whether this server is alive, whether it can answer, and what it is."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.transport.errors import ErrorKind, retry_later, shutting_down

if TYPE_CHECKING:
    from penstock.frontend.endpoints.context import EndpointContext
    from penstock.frontend.transport.exchange import Exchange

VERSION = importlib.metadata.version("penstock")
READY_PATH = "/ready"
_SHOWN_COUNTERS = ("running", "waiting", "pages_used", "pages_total")


async def health(exchange: Exchange, _context: EndpointContext) -> None:
    """GET /health: the process is alive, whatever the backend does."""
    await exchange.respond(200, b'{"status":"ok"}')


async def ready(exchange: Exchange, context: EndpointContext) -> None:
    """GET /ready: a request could be answered now. Raises ApiError."""
    if context.exchanges.is_draining:
        raise shutting_down()
    if not context.backend.ready:
        message = "the backend is not connected or makes no progress; retry later"
        raise retry_later(ErrorKind.UNAVAILABLE, message, context.backend.retry_after_s)
    context.model_now()
    await exchange.respond(200, msgspec.json.encode({"status": "ready"} | shown_counters(context)))


async def version(exchange: Exchange, _context: EndpointContext) -> None:
    """GET /version."""
    await exchange.respond(200, msgspec.json.encode({"version": VERSION}))


def shown_counters(context: EndpointContext) -> dict[str, int]:
    """Return the backend's sequences and pages; nothing when there is no backend."""
    counters = context.backend.backend_counters or {}
    return {name: counters[name] for name in _SHOWN_COUNTERS if name in counters}
