"""POST /: TEI's root, which does the model's main task."""

from __future__ import annotations

from typing import TypeAlias

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.pooling import tei_embed, tei_predict
from penstock.frontend.generation.models.model_table import ServedModels, Task, can_do
from penstock.frontend.schemas.pooling.tei import (
    EmbedBody,
    EmbedPlainBody,
    PredictBody,
    TeiRerankBody,
    decode_embed,
    decode_embed_plain,
    decode_predict,
    decode_tei_rerank,
    is_tei_rerank,
    named_model,
)
from penstock.frontend.transport.exchange import Exchange

_RootBody: TypeAlias = EmbedBody | EmbedPlainBody | PredictBody | TeiRerankBody


async def root(exchange: Exchange, context: EndpointContext) -> None:
    """POST /: /rerank for a body with texts; otherwise /embed, /embed_sparse or /predict, the first that the model can
    do. Raises ApiError, ClientGoneError."""

    def decode(data: bytes) -> _RootBody:
        if is_tei_rerank(data):
            return decode_tei_rerank(data)
        match _task(context.models, named_model(data)):
            case "classify":
                return decode_predict(data)
            case "sparse":
                return decode_embed_plain(data)
            case _:
                return decode_embed(data)

    body, served, num_body_bytes = await context.receive_body(exchange, decode, _needed)
    match body:
        case TeiRerankBody():
            await tei_predict.answer_rerank(exchange, body, served)
        case PredictBody():
            await tei_predict.answer_predict(exchange, body, served)
        case EmbedPlainBody():
            await tei_embed.answer_embed_sparse(exchange, body, served, num_body_bytes)
        case EmbedBody():
            await tei_embed.answer_embed(exchange, body, served, num_body_bytes)


def _needed(body: _RootBody) -> Task:
    match body:
        case TeiRerankBody():
            return "rerank"
        case PredictBody():
            return "classify"
        case EmbedPlainBody():
            return "sparse"
        case _:
            return "embed"


def _task(models: ServedModels, requested: str | None) -> Task:
    """Return the task of a body with inputs: the first that the named model, or any model, can do."""
    tasks: tuple[Task, ...] = ("embed", "sparse", "classify")
    for task in tasks:
        for served in models.loaded():
            if requested in (None, served.card.model_id) and can_do(served.card, task):
                return task
    return "embed"
