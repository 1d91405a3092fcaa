"""POST /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Awaitable

import msgspec

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.ollama.requests import receive
from penstock.frontend.endpoints.pooling.computing import Computed, compute, names_of, vector_width
from penstock.frontend.formats.vectors import json_vector
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.submission.pooled_inputs import InputRules, encode_inputs, prompt_text
from penstock.frontend.generation.submission.pooled_run import Wanted
from penstock.frontend.schemas.ollama import OllamaBody, OllamaEmbedBody, decode_ollama_embed, decode_ollama_embeddings
from penstock.frontend.text.input_encoder import Truncation
from penstock.frontend.transport.exchange import Exchange


async def embed(exchange: Exchange, context: EndpointContext) -> None:
    """POST /api/embed: vectors of length 1; texts that are too long are truncated unless truncate is false.

    Raises ApiError, ClientGoneError.
    """

    def answer(body: OllamaEmbedBody, load_s: float, computed: Computed[bytes] | None = None) -> Awaitable[None]:
        vectors = [] if computed is None else computed.results
        parts = [part for vector in vectors for part in (b",", vector)][1:]
        total_s = time.monotonic() - exchange.received_s
        end = {
            "total_duration": round(total_s * 1e9),
            "load_duration": round(load_s * 1e9),
            "prompt_eval_count": 0 if computed is None else computed.num_tokens,
        }
        head = [b'{"model":', msgspec.json.encode(body.model), b',"embeddings":[']
        headers = () if computed is None else computed.headers()
        return exchange.respond_in_parts(200, [*head, *parts, b"],", msgspec.json.encode(end)[1:]], headers)

    received = await receive(exchange, context, decode_ollama_embed, "embed", lambda body: not body.input, answer)
    if received is None:
        return
    body, served = received.body, received.served
    rules = _rules("input", served, is_list=isinstance(body.input, list), truncates=body.truncate is not False)
    wanted = Wanted("embed", vector_width(body.dimensions, "embed", served.card), normalize=True)
    await answer(body, received.load_s, await _computed(exchange, body, served, body.inputs(), rules, wanted, "input"))


async def embeddings(exchange: Exchange, context: EndpointContext) -> None:
    """POST /api/embeddings: one vector as the model computes it. Raises ApiError, ClientGoneError."""

    def answer_empty(_body: OllamaBody, _load_s: float) -> Awaitable[None]:
        return exchange.respond(200, b'{"embedding":[]}')

    received = await receive(
        exchange, context, decode_ollama_embeddings, "embed", lambda body: not body.prompt, answer_empty
    )
    if received is None:
        return
    body, served = received.body, received.served
    rules, wanted = _rules("prompt", served, is_list=False, truncates=True), Wanted("embed", normalize=False)
    computed = await _computed(exchange, body, served, [body.prompt or ""], rules, wanted, "prompt")
    await exchange.respond(200, b'{"embedding":%b}' % computed.results[0], computed.headers())


def _rules(field: str, served: ServedModel, *, is_list: bool, truncates: bool) -> InputRules:
    return InputRules(
        names_of(field, is_list=is_list),
        Truncation(served.card.max_context_tokens if truncates else None),
        prompt=prompt_text(served.pooling, None),
        how_to_truncate="truncate true truncates it",
        may_truncate=truncates,
    )


async def _computed(
    exchange: Exchange,
    body: OllamaBody,
    served: ServedModel,
    texts: list[str],
    rules: InputRules,
    wanted: Wanted,
    field: str,
) -> Computed[bytes]:
    return await compute(
        exchange,
        body,
        served,
        lambda: encode_inputs(texts, rules, served),
        wanted,
        lambda result: json_vector(result.values),
        num_inputs=len(texts),
        field=field,
        id_prefix="embd-",
    )
