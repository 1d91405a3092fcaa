"""GET /v1/models and GET /v1/models/{model}: the one model that is served."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.transport.errors import ApiError, ErrorKind, shorten

if TYPE_CHECKING:
    from penstock.frontend.endpoints.context import EndpointContext
    from penstock.frontend.generation.served_model import ServedModel
    from penstock.frontend.transport.exchange import Exchange
    from penstock.shm.messages import ModelCard

_PATH = "/v1/models/"


async def list_models(exchange: Exchange, context: EndpointContext) -> None:
    """GET /v1/models. Raises ApiError, ClientGoneError."""
    served = await context.model_soon(exchange)
    card = served.card
    pages = {"has_more": False, "first_id": card.model_id, "last_id": card.model_id}  # Anthropic's
    body = {"object": "list", "data": [_describe(served)], **pages}
    await exchange.respond(200, msgspec.json.encode(body))


async def describe_model(exchange: Exchange, context: EndpointContext) -> None:
    """GET /v1/models/{model}. Raises ApiError, ClientGoneError."""
    served = await context.model_soon(exchange)
    check_model(exchange.path.removeprefix(_PATH), served.card)
    await exchange.respond(200, msgspec.json.encode(_describe(served)))


def check_model(requested: str | None, card: ModelCard) -> None:
    """Raises ApiError when a request names another model than the served one."""
    if requested is not None and requested != card.model_id:
        message = f"model: {shorten(requested)} does not exist; this server has {shorten(card.model_id)}"
        raise ApiError(ErrorKind.UNKNOWN_MODEL, message, param="model")


def _describe(served: ServedModel) -> dict[str, object]:
    """Return OpenAI's model object and Anthropic's in one, and what the model can do."""
    card, syntax = served.card, served.syntax
    return {
        "id": card.model_id,
        "object": "model",
        "type": "model",
        "display_name": card.model_id,
        "created": card.created,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "owned_by": "penstock",
        "max_model_len": card.max_context_tokens,
        "vocab_size": card.vocab_size,
        "quantization": card.quantization,
        "capabilities": {
            "chat": served.tokenizer.chat_template is not None,
            "tool_calls": syntax.tools is not None and syntax.shows_tools,
            "reasoning": syntax.reasoning is not None,
            "structured_output": True,
            "vision": False,
        },
    }
