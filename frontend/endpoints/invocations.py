"""POST /invocations: Amazon SageMaker's one path for all requests; the body's fields choose the endpoint."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.frontend.endpoints import chat_completions, label_scores, text_completions
from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.pooling import openai_embeddings, rerank, vllm_scores
from penstock.frontend.endpoints.routes import Handler
from penstock.frontend.generation.models.model_table import can_do
from penstock.frontend.transport.errors import ApiError, ErrorKind
from penstock.frontend.transport.exchange import Exchange


class _Fields(msgspec.Struct):
    """The fields that choose an endpoint. Only their presence matters; the endpoint checks them."""

    messages: Any = None
    prompt: Any = None
    input: Any = None
    query: Any = None
    queries: Any = None
    text_1: Any = None
    data_1: Any = None


_fields = msgspec.json.Decoder(_Fields)


async def invoke(exchange: Exchange, context: EndpointContext) -> None:
    """POST /invocations. Raises ApiError, ClientGoneError."""
    fields = await context.read_ahead(exchange, _fields)
    await _handler(fields, context)(exchange, context)


def _handler(fields: _Fields, context: EndpointContext) -> Handler:
    """Raises ApiError."""
    if fields.messages is not None:
        return chat_completions.create_chat_completion
    if fields.prompt is not None:
        return text_completions.create_completion
    if fields.query is not None:
        return rerank.rerank
    if fields.queries is not None or fields.text_1 is not None or fields.data_1 is not None:
        return label_scores.score
    if fields.input is not None:
        embeds = any(can_do(served.card, "embed") for served in context.models.loaded())
        return openai_embeddings.create_embeddings if embeds else vllm_scores.classify
    names = ", ".join(_Fields.__struct_fields__)
    raise ApiError(ErrorKind.MISSING_FIELD, f"messages: required, or another of {names}", param="messages")
