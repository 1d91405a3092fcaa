"""GET /v1/models and GET /v1/models/{model}: the served models and their abilities.

POST /v1/models/load and /v1/models/unload: an administrator wakes a model, or lets it sleep.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Literal

import msgspec

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.generation.models.model_table import can_do, names_of
from penstock.frontend.generation.models.served_model import ModelKeeper, ServedModel, named_tokens, shown_sampling
from penstock.frontend.generation.models.waking import WakingModel
from penstock.frontend.schemas.answers import ModelStateAnswer
from penstock.frontend.schemas.utilities import decode_model_command
from penstock.frontend.transport.errors import ApiError, ErrorKind, retry_later, shorten
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.client import backends_of
from penstock.shm.memory.model_table import ModelState

_PATH = "/v1/models/"
_STATES: dict[ModelState, Literal["asleep", "loading", "awake"]] = {
    ModelState.ASLEEP: "asleep",
    ModelState.STARTING: "loading",
    ModelState.LOADING: "loading",
    ModelState.AWAKE: "awake",
    ModelState.FALLING_ASLEEP: "asleep",
}


async def list_models(exchange: Exchange, context: EndpointContext) -> None:
    """GET /v1/models. Models that have never been loaded are left out, unless they can be woken. Raises ApiError,
    ClientGoneError."""
    keepers = context.models.keepers
    if not any(keeper.waking is not None for keeper in keepers):
        await context.model_soon(exchange, "any")
    data = [_describe(keeper, name) for keeper in keepers for name in names_of(keeper)]
    pages = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}  # Anthropic's
    await exchange.respond(200, msgspec.json.encode({"object": "list", "data": data, **pages}))


async def describe_model(exchange: Exchange, context: EndpointContext) -> None:
    """GET /v1/models/{model}. Raises ApiError, ClientGoneError."""
    name = exchange.path.removeprefix(_PATH)
    keeper = context.models.find("any", name)
    if keeper.waking is None:
        await context.model_soon(exchange, "any", name)
        keeper = context.models.find("any", name)
    await exchange.respond(200, msgspec.json.encode(_describe(keeper, name)))


def _describe(keeper: ModelKeeper, name: str) -> dict[str, object]:
    """Return the model's object; for a model that has never been loaded, only the known fields.

    name is the model's or an alias.
    """
    found: dict[str, object] = {"id": name, "object": "model", "created": 0, "owned_by": "penstock", "root": name}
    if keeper.current is not None:
        found |= _known(keeper.current, name)
    if keeper.waking is not None:
        found |= {
            "state": _STATES[keeper.waking.state],
            "last_wake_seconds": keeper.waking.last_wake_s,
            "last_error": keeper.waking.failure,
        }
    if keeper.failure is not None:
        found["last_error"] = keeper.failure
    return found


def _known(served: ServedModel, name: str) -> dict[str, object]:
    """Return OpenAI's model object and Anthropic's in one, with the model's abilities."""
    card, syntax, adapter = served.card, served.syntax, served.card.adapter_named(name)
    created = card.created if adapter is None else adapter.created
    _, backend = backends_of(served.backend)[0]  # replicas have as many pages each
    counters = backend.backend_counters or {}
    kv_tokens = counters.get("pages_total", 0) * counters.get("page_size_tokens", 0)
    token_step_us = counters.get("token_step_us", 0)
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": created,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "owned_by": "penstock",
        "root": card.model_id if adapter is None else name,
        "parent": None if adapter is None else card.model_id,
        "max_model_len": card.max_context_tokens,
        "kv_cache_tokens": kv_tokens or None,
        "max_tokens_per_second": round(1e6 / token_step_us, 1) if token_step_us else None,
        "vocab_size": card.vocab_size,
        "quantization": card.quantization,
        "end_tokens": named_tokens(served.end_token_ids, served.tokenizer) if card.generates else None,
        "default_sampling": shown_sampling(card.default_sampling) if card.generates else None,
        "tools": syntax.tools_name if card.generates else None,
        "capabilities": {
            "chat": card.generates and served.tokenizer.chat_template is not None,
            "tool_calls": card.generates and syntax.tools is not None,
            "reasoning": card.generates and syntax.reasoning is not None,
            "structured_output": card.generates,
            "vision": served.takes_pictures,
            "embeddings": can_do(card, "embed"),
            "sparse_embeddings": can_do(card, "sparse"),
            "rerank": can_do(card, "rerank"),
            "classify": can_do(card, "classify"),
        },
        "input_modalities": ["text", "image"] if served.takes_pictures else ["text"],
        "embedding_dimensions": card.pooled_width("embed"),
    }


async def load(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/models/load: answers when the model is awake. Raises ApiError, ClientGoneError."""
    name, keeper, waking = await _model(exchange, context)
    await context.wake(exchange, keeper, waking)
    await _respond(exchange, name, waking)


async def unload(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/models/unload: answers when the model is asleep. A model that requests need stays awake.

    Raises ApiError, ClientGoneError.
    """
    name, _, waking = await _model(exchange, context)
    try:
        async with asyncio.timeout(context.limits.hold_timeout_s), exchange.cancelled_on_disconnect():
            await waking.until_asleep()
    except TimeoutError:
        raise retry_later(ErrorKind.UNAVAILABLE, f"{shorten(name)} is not asleep yet; retry later", 1) from None
    if waking.num_open:
        message = f"model: {shorten(name)} is needed by {waking.num_open} open requests; it sleeps when they have ended"
        raise ApiError(ErrorKind.MODEL_IN_USE, message, param="model")
    await _respond(exchange, name, waking)


async def _model(exchange: Exchange, context: EndpointContext) -> tuple[str, ModelKeeper, WakingModel]:
    """Return the named model. Raises ApiError: without an admin key, for an unknown model, and for one that is always
    awake."""
    if not exchange.is_admin:
        message = "this needs an API key with admin=yes in the server's --api-key-file"
        raise ApiError(ErrorKind.NO_ADMIN, message)
    body = await context.receive_command(exchange, decode_model_command)
    keeper = context.models.find("any", body.model)
    if keeper.waking is None:
        message = f"model: {shorten(body.model)} is always awake; models sleep with --models-dir or --sleep-after-s"
        raise ApiError(ErrorKind.WRONG_MODEL, message, param="model")
    return body.model, keeper, keeper.waking


async def _respond(exchange: Exchange, name: str, waking: WakingModel) -> None:
    answer = ModelStateAnswer(name, _STATES[waking.state], waking.last_wake_s)
    await exchange.respond(200, msgspec.json.encode(answer))
