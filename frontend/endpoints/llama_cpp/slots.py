"""GET /slots and /lora-adapters: what runs, and which adapters there are."""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.transport.errors import ErrorKind, retry_later
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.client import backends_of


async def slots(exchange: Exchange, context: EndpointContext) -> None:
    """GET /slots: one for each running sequence, and an idle one while none waits.

    ?fail_on_no_slot=1 asks for 503 without an idle one. Raises ApiError, ClientGoneError.
    """
    query = parse_qs(exchange.query.decode("latin-1"))
    served = await context.model_soon(exchange, "any", query.get("model", [None])[0])
    num_running, num_all = _count(served, "running"), num_slots(served)
    if num_all == num_running and query.get("fail_on_no_slot") == ["1"]:
        raise retry_later(ErrorKind.UNAVAILABLE, "no slot available", served.backend.retry_after_s)
    answer = [
        {
            "id": index,
            "id_task": index if index < num_running else -1,
            "n_ctx": served.card.max_context_tokens,
            "speculative": False,
            "is_processing": index < num_running,
        }
        for index in range(num_all)
    ]
    await exchange.respond(200, msgspec.json.encode(answer))


async def lora_adapters(exchange: Exchange, context: EndpointContext) -> None:
    """GET /lora-adapters. A request uses one by its name, as `model`; so the scale of all is 0 for others. Raises
    ApiError, ClientGoneError."""
    requested = parse_qs(exchange.query.decode("latin-1")).get("model", [None])[0]
    served = await context.model_soon(exchange, "any", requested)
    answer = [{"id": index, "path": adapter.name, "scale": 0.0} for index, adapter in enumerate(served.card.adapters)]
    await exchange.respond(200, msgspec.json.encode(answer))


def num_slots(served: ServedModel) -> int:
    """There is no fixed number: a backend runs as many sequences as its memory holds."""
    num_running = _count(served, "running")
    return num_running + (_count(served, "waiting") == 0)


def _count(served: ServedModel, name: str) -> int:
    return sum((backend.backend_counters or {}).get(name, 0) for _, backend in backends_of(served.backend))
