"""POST /v1/embeddings: OpenAI's embeddings."""

from __future__ import annotations

import msgspec

from penstock.frontend.endpoints.context import EndpointContext, run_sized
from penstock.frontend.endpoints.pooling.computing import (
    HOW_TO_TRUNCATE,
    Computed,
    compute,
    names_of,
    vector_width,
    vllm_truncation,
)
from penstock.frontend.formats.vectors import base64_vector, json_vector
from penstock.frontend.generation.submission.pooled_inputs import InputRules, encode_inputs, prompt_text
from penstock.frontend.generation.submission.pooled_run import Wanted
from penstock.frontend.schemas.pooling.common import has_several
from penstock.frontend.schemas.pooling.openai import decode_embeddings
from penstock.frontend.transport.exchange import Exchange


async def create_embeddings(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/embeddings. Raises ApiError, ClientGoneError."""
    body, served, num_body_bytes = await context.receive_body(exchange, decode_embeddings, "embed")
    write = base64_vector if body.encoding_format == "base64" else json_vector
    rules = InputRules(
        names_of("input", is_list=has_several(body.input)),
        vllm_truncation(body, served.card),
        add_special_tokens=body.add_special_tokens is not False,
        prompt=prompt_text(served.pooling, body.prompt_name),
        how_to_truncate=HOW_TO_TRUNCATE,
    )
    wanted = Wanted("embed", vector_width(body.dimensions, "embed", served.card), body.is_normalized)
    inputs = await run_sized(num_body_bytes, body.inputs)
    computed = await compute(
        exchange,
        body,
        served,
        lambda: encode_inputs(inputs, rules, served),
        wanted,
        lambda result: write(result.values),
        num_inputs=len(inputs),
        field="input",
        id_prefix="embd-",
    )
    await exchange.respond_in_parts(200, _answer(computed, served.card.model_id), computed.headers())


def _answer(computed: Computed[bytes], model: str) -> list[bytes]:
    parts = [b'{"object":"list","data":[']
    for index, vector in enumerate(computed.results):
        parts += [b'%s{"object":"embedding","index":%d,"embedding":' % (b"," if index else b"", index), vector, b"}"]
    end = msgspec.json.encode({"model": model, "usage": computed.usage()})
    return [*parts, b"]," + end[1:]]
