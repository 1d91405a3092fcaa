"""POST /v1/embed and /v2/embed: Cohere's embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.frontend.endpoints.context import EndpointContext, run_sized
from penstock.frontend.endpoints.pooling.computing import Computed, compute, names_of, vector_width
from penstock.frontend.formats.vectors import base64_vector, json_vector, quantized_vector
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.submission.pooled_inputs import InputRules, encode_inputs, prompt_text
from penstock.frontend.generation.submission.pooled_run import Wanted
from penstock.frontend.schemas.pooling.cohere import CohereEmbedBody, EmbeddingType, InputType, decode_cohere_embed
from penstock.frontend.text.input_encoder import Truncation
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.client import PooledResult
from penstock.shm.messages import ModelCard

_PROMPTS: dict[InputType, tuple[str, ...]] = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Names of prompts in models' files, by type of input. The first name that a model has is used."""


async def embed(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/embed and /v2/embed. Raises ApiError, ClientGoneError."""
    body, served, num_body_bytes = await context.receive_body(exchange, decode_cohere_embed, "embed")
    texts, field = await run_sized(num_body_bytes, body.listed), body.input_field()
    rules = InputRules(
        names_of(field, is_list=True),
        _truncation(body, served.card),
        prompt=prompt_text(served.pooling, _prompt_name(body.input_type, served)),
        how_to_truncate='truncate "END" truncates it',
        may_truncate=body.truncate != "NONE",
    )
    types: list[EmbeddingType] = list(dict.fromkeys(body.embedding_types or ["float"]))

    def write(result: PooledResult) -> list[bytes]:
        return [_written(result, kind) for kind in types]

    computed = await compute(
        exchange,
        body,
        served,
        lambda: encode_inputs(texts, rules, served),
        Wanted("embed", vector_width(body.output_dimension, "embed", served.card), normalize=True),
        write,
        num_inputs=len(texts),
        field=field,
        id_prefix="embd-",
    )
    is_first = exchange.path == "/v1/embed"
    plain = is_first and body.embedding_types is None  # the form that /v1 had before there were types
    answer = _answer(computed, None if plain else types, texts, "1" if is_first else "2")
    await exchange.respond_in_parts(200, answer, computed.headers())


def _written(result: PooledResult, kind: EmbeddingType) -> bytes:
    if kind == "float":
        return json_vector(result.values)
    return base64_vector(result.values) if kind == "base64" else quantized_vector(result.values, kind)


def _truncation(body: CohereEmbedBody, card: ModelCard) -> Truncation:
    if body.truncate == "NONE":
        return Truncation()
    limit = min(body.max_tokens or card.max_context_tokens, card.max_context_tokens)
    return Truncation(limit, "left" if body.truncate == "START" else "right")


def _prompt_name(input_type: InputType | None, served: ServedModel) -> str | None:
    """Return the name of the model's prompt for inputs of this type; None if it has at most the default one."""
    names = () if input_type is None else _PROMPTS[input_type]
    return next((name for name in names if name in served.pooling.prompts), None)


def _answer(
    computed: Computed[list[bytes]], types: Sequence[EmbeddingType] | None, texts: list[str], version: str
) -> list[bytes]:
    """Return the answer in parts; without types, as one list of vectors."""
    kind = b"embeddings_floats" if types is None else b"embeddings_by_type"
    parts = [b'{"id":"%s","response_type":"%s","embeddings":' % (computed.request_id.encode(), kind)]
    for place, name in enumerate(types or ("float",)):
        if types is not None:
            parts.append(b'%s"%s":' % (b"," if place else b"{", name.encode()))
        for index, written in enumerate(computed.results):
            parts += [b"," if index else b"[", written[place]]
        parts.append(b"]")
    meta = {"api_version": {"version": version}, "billed_units": {"input_tokens": computed.num_tokens}}
    end = msgspec.json.encode({"texts": texts, "meta": meta})
    return [*parts, b"," if types is None else b"},", end[1:]]
