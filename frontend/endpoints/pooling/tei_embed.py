"""POST /embed, /embed_all, /embed_sparse and /similarity, as in text-embeddings-inference (TEI).

Its rules for inputs and its headers are those of all of TEI's endpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from penstock.frontend.endpoints.context import EndpointContext, run_sized
from penstock.frontend.endpoints.pooling.computing import Computed, Taken, compute, names_of, vector_width
from penstock.frontend.formats.vectors import json_matrix, json_vector
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.submission.pooled_inputs import InputRules, Name, encode_inputs, prompt_text
from penstock.frontend.generation.submission.pooled_run import Wanted
from penstock.frontend.generation.submission.pooled_scores import cosine
from penstock.frontend.schemas.pooling.common import has_several
from penstock.frontend.schemas.pooling.tei import (
    EmbedBody,
    EmbedPlainBody,
    SimilarityBody,
    TeiBody,
    decode_embed,
    decode_embed_plain,
    decode_similarity,
)
from penstock.frontend.text.input_encoder import Truncation
from penstock.frontend.transport.asgi import Headers
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.client import PooledResult


def tei_rules(body: TeiBody, served: ServedModel, name: Name, prompt: str = "") -> InputRules:
    return InputRules(
        name,
        Truncation(served.card.max_context_tokens if body.truncate else None, body.side),
        prompt=prompt,
        how_to_truncate="truncate true truncates it",
        may_truncate=body.truncate is not False,
    )


def tei_headers(computed: Computed[Any], num_characters: int) -> Headers:
    """Return TEI's headers, whose times are in milliseconds, with those of every other answer."""
    times = computed.times
    total_s = time.monotonic() - computed.received_s
    tokenization_s = times.tokenized_s - computed.received_s
    spent_s = {
        b"x-total-time": total_s,
        b"x-compute-time": total_s,
        b"x-tokenization-time": tokenization_s,
        b"x-queue-time": times.queue_s,
        b"x-inference-time": max(0.0, total_s - tokenization_s - times.queue_s),
    }
    return (
        (b"x-compute-characters", b"%d" % num_characters),
        (b"x-compute-tokens", b"%d" % computed.num_tokens),
        *((name, b"%d" % round(1000 * duration_s)) for name, duration_s in spent_s.items()),
        *computed.headers(),
    )


async def embed(exchange: Exchange, context: EndpointContext) -> None:
    """POST /embed: an array with a vector for each input, normalised unless the request says otherwise. Raises
    ApiError, ClientGoneError."""
    await answer_embed(exchange, *await context.receive_body(exchange, decode_embed, "embed"))


async def answer_embed(exchange: Exchange, body: EmbedBody, served: ServedModel, num_body_bytes: int) -> None:
    """Answer /embed. Raises ApiError, ClientGoneError."""
    wanted = Wanted("embed", vector_width(body.dimensions, "embed", served.card), body.normalize is not False)
    texts = await run_sized(num_body_bytes, body.texts)
    await _answer(exchange, body, texts, served, wanted, lambda result: [json_vector(result.values)])


async def embed_all(exchange: Exchange, context: EndpointContext) -> None:
    """POST /embed_all: for each input an array with a vector for each token. Raises ApiError, ClientGoneError."""
    body, served, num_body_bytes = await context.receive_body(exchange, decode_embed_plain, "token_embed")
    texts = await run_sized(num_body_bytes, body.texts)

    def write(result: PooledResult) -> list[bytes]:
        return json_matrix(result.values, result.num_vectors)

    await _answer(exchange, body, texts, served, Wanted("token_embed"), write)


async def embed_sparse(exchange: Exchange, context: EndpointContext) -> None:
    """POST /embed_sparse: for each input the tokens whose weights are not zero. Raises ApiError, ClientGoneError."""
    await answer_embed_sparse(exchange, *await context.receive_body(exchange, decode_embed_plain, "sparse"))


async def answer_embed_sparse(
    exchange: Exchange, body: EmbedPlainBody, served: ServedModel, num_body_bytes: int
) -> None:
    """Answer /embed_sparse. Raises ApiError, ClientGoneError."""
    texts = await run_sized(num_body_bytes, body.texts)

    def write(result: PooledResult) -> list[bytes]:
        weights = zip(result.indices or (), result.values, strict=True)
        return [msgspec.json.encode([{"index": index, "value": value} for index, value in weights])]

    await _answer(exchange, body, texts, served, Wanted("sparse"), write)


async def similarity(exchange: Exchange, context: EndpointContext) -> None:
    """POST /similarity: the cosine of each sentence's vector with that of the source sentence. Raises ApiError,
    ClientGoneError."""
    body, served, _ = await context.receive_body(exchange, decode_similarity, "embed")
    texts: list[str | list[int]] = [body.inputs.source_sentence, *body.inputs.sentences]

    def name(index: int) -> str:
        return f"inputs.sentences[{index - 1}]" if index else "inputs.source_sentence"

    wanted = Wanted("embed", normalize=True)
    computed = await _compute(exchange, body, texts, served, wanted, lambda result: result.values, name)
    source, *others = computed.results
    answer = msgspec.json.encode([cosine(source, other) for other in others])
    await exchange.respond(200, answer, tei_headers(computed, _num_characters(texts)))


async def _answer(
    exchange: Exchange,
    body: EmbedBody | EmbedPlainBody,
    texts: list[str | list[int]],
    served: ServedModel,
    wanted: Wanted,
    write: Callable[[PooledResult], list[bytes]],
) -> None:
    name = names_of("inputs", is_list=has_several(body.inputs))
    computed = await _compute(exchange, body, texts, served, wanted, write, name)
    parts: list[bytes] = []
    for index, written in enumerate(computed.results):
        parts += [b"," if index else b"[", *written]
    await exchange.respond_in_parts(200, [*parts, b"]"], tei_headers(computed, _num_characters(texts)))


async def _compute(
    exchange: Exchange,
    body: EmbedBody | EmbedPlainBody | SimilarityBody,
    texts: list[str | list[int]],
    served: ServedModel,
    wanted: Wanted,
    take: Callable[[PooledResult], Taken],
    name: Name,
) -> Computed[Taken]:
    rules = tei_rules(body, served, name, prompt_text(served.pooling, body.prompt_name))
    encode = partial(encode_inputs, texts, rules, served)
    return await compute(
        exchange, body, served, encode, wanted, take, num_inputs=len(texts), field="inputs", id_prefix="embd-"
    )


def _num_characters(texts: list[str | list[int]]) -> int:
    return sum(len(text) for text in texts if isinstance(text, str))
