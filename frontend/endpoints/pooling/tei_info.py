"""GET /info: TEI's description of the model that embeds or scores."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.server.health import VERSION
from penstock.frontend.generation.models.model_table import can_do
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.schemas.pooling.common import MAX_INPUTS
from penstock.frontend.transport.exchange import Exchange


async def info(exchange: Exchange, context: EndpointContext) -> None:
    """GET /info. Values that this server does not know, or bounds differently, are null. Raises ApiError,
    ClientGoneError."""
    served = await context.model_soon(exchange, "pooled")
    card = served.card
    body = {
        "model_id": card.model_id,
        "model_sha": None,
        "model_dtype": None,
        "model_type": _model_type(served),
        "max_concurrent_requests": context.limits.max_open_requests,
        "max_input_length": card.max_context_tokens,
        "max_batch_tokens": None,
        "max_batch_requests": None,
        "max_client_batch_size": MAX_INPUTS,
        "auto_truncate": False,
        "tokenization_workers": None,
        "version": VERSION,
        "sha": None,
        "docker_label": None,
    }
    await exchange.respond(200, msgspec.json.encode(body))


def _model_type(served: ServedModel) -> dict[str, Any]:
    card = served.card
    width = card.pooled_width("classify")
    if width is not None and not can_do(card, "embed"):
        labels = {str(index): served.pooling.label(index) for index in range(width)}
        ids = {label: int(index) for index, label in labels.items()}
        return {"reranker" if width == 1 else "classifier": {"id2label": labels, "label2id": ids}}
    return {"embedding": {"pooling": "splade" if card.pooled[0].kind == "sparse" else served.pooling.pooling}}
