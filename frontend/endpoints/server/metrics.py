"""GET /metrics for Prometheus, and GET /v1/load for load balancers."""

from __future__ import annotations

import os

import msgspec

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.server.health import shown_counters
from penstock.frontend.telemetry import metrics
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.client import backends_of


async def prometheus(exchange: Exchange, context: EndpointContext) -> None:
    """GET /metrics."""
    sources = [
        metrics.Source(
            (keeper.name or "") if keeper.backend.model is None else keeper.backend.model.model_id,
            backend.counters,
            backend.backend_counters,
            name,
            0 if backend.model is None else len(backend.model.adapters),
        )
        for keeper in context.models.keepers
        for name, backend in backends_of(keeper.backend)
    ]
    page = metrics.render(os.getpid(), sources)
    await exchange.respond(200, page, content_type=metrics.CONTENT_TYPE)


async def load(exchange: Exchange, context: EndpointContext) -> None:
    """GET /v1/load: other open requests of this worker, and the whole system's sequences and pages."""
    body = {"server_load": len(context.exchanges) - 1} | shown_counters(context.models.keepers)
    await exchange.respond(200, msgspec.json.encode(body))
