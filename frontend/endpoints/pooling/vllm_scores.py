"""POST /score, /v1/score, /classify and /pooling, as in vLLM."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.frontend.endpoints.context import EndpointContext, run_sized
from penstock.frontend.endpoints.pooling.computing import (
    HOW_TO_TRUNCATE,
    Computed,
    compute,
    encode_pairs,
    names_of,
    vector_width,
    vllm_truncation,
)
from penstock.frontend.formats.vectors import base64_vector, json_matrix, json_vector
from penstock.frontend.generation.models.model_table import Task, can_do
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.submission.pooled_inputs import InputRules, encode_inputs, prompt_text
from penstock.frontend.generation.submission.pooled_run import Wanted
from penstock.frontend.generation.submission.pooled_scores import activated, cosine
from penstock.frontend.schemas.pooling.common import has_several
from penstock.frontend.schemas.pooling.vllm import ClassifyBody, PoolingBody, ScoreBody, decode_classify, decode_pooling
from penstock.frontend.transport.errors import invalid
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.client import PooledResult
from penstock.shm.messages import PooledKind


async def answer_score(exchange: Exchange, body: ScoreBody, served: ServedModel) -> None:
    """Answer POST /score and /v1/score by a reranker, or by the angle between two embeddings. Raises ApiError,
    ClientGoneError."""
    computed = await (_by_pair if can_do(served.card, "rerank") else _by_angle)(exchange, body, served)
    data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(computed.results)]
    await _respond(exchange, computed, served, msgspec.json.encode(data))


async def classify(exchange: Exchange, context: EndpointContext) -> None:
    """POST /classify. Raises ApiError, ClientGoneError."""
    body, served, num_body_bytes = await context.receive_body(exchange, decode_classify, "classify")
    inputs = await run_sized(num_body_bytes, body.inputs)
    computed = await compute(
        exchange,
        body,
        served,
        lambda: encode_inputs(inputs, _rules(body, served), served),
        Wanted("classify"),
        lambda result: _scores(result.values, served, is_activated=body.is_activated),
        num_inputs=len(inputs),
        field="input",
        id_prefix="classify-",
    )
    data = [_class(index, probs, served) for index, probs in enumerate(computed.results)]
    await _respond(exchange, computed, served, msgspec.json.encode(data))


async def pooling(exchange: Exchange, context: EndpointContext) -> None:
    """POST /pooling: the vectors of any kind that the model has. Raises ApiError, ClientGoneError."""

    def task_of(body: PoolingBody) -> Task:
        return body.task or "pooled"

    body, served, num_body_bytes = await context.receive_body(exchange, decode_pooling, task_of)
    inputs = await run_sized(num_body_bytes, body.inputs)
    kind: PooledKind = body.task or served.card.pooled[0].kind
    if kind == "sparse":
        invalid("task", '"sparse" is answered by /embed_sparse')
    is_embedding = kind in ("embed", "token_embed")
    if body.dimensions is not None and not is_embedding:
        invalid("dimensions", f'not for task "{kind}"')
    wanted = Wanted(kind)
    if is_embedding:
        is_normalized = body.is_activated and body.normalize is not False
        wanted = Wanted(kind, vector_width(body.dimensions, kind, served.card), is_normalized)
    computed = await compute(
        exchange,
        body,
        served,
        lambda: encode_inputs(inputs, _rules(body, served), served),
        wanted,
        _writer(body, kind, served),
        num_inputs=len(inputs),
        field="input",
        id_prefix="pool-",
    )
    parts: list[bytes] = []
    for index, data in enumerate(computed.results):
        parts += [b'%s{"index":%d,"object":"pooling","data":' % (b"," if index else b"", index), *data, b"}"]
    await _respond(exchange, computed, served, b"[", *parts, b"]")


def _writer(body: PoolingBody, kind: PooledKind, served: ServedModel) -> Callable[[PooledResult], list[bytes]]:
    def write(result: PooledResult) -> list[bytes]:
        values, num_vectors = result.values, result.num_vectors
        if kind in ("classify", "token_classify") and body.is_activated:
            width = len(values) // num_vectors
            rows = [values[row * width : (row + 1) * width] for row in range(num_vectors)]
            values = array("f", [each for row in rows for each in _scores(row, served, is_activated=True)])
        if body.encoding_format == "base64":
            return [base64_vector(values)]
        return json_matrix(values, num_vectors) if kind.startswith("token_") else [json_vector(values)]

    return write


def _rules(body: ClassifyBody, served: ServedModel) -> InputRules:
    return InputRules(
        names_of("input", is_list=has_several(body.input)),
        vllm_truncation(body, served.card),
        add_special_tokens=body.add_special_tokens is not False,
        how_to_truncate=HOW_TO_TRUNCATE,
    )


async def _by_pair(exchange: Exchange, body: ScoreBody, served: ServedModel) -> Computed[float]:
    field, pairs = body.second_field(), body.pairs()
    rules = InputRules(
        names_of(field, is_list=True), vllm_truncation(body, served.card), how_to_truncate=HOW_TO_TRUNCATE
    )
    return await compute(
        exchange,
        body,
        served,
        lambda: encode_pairs(pairs, rules, served, body.instruction),
        Wanted("classify"),
        lambda result: _scores(result.values, served, is_activated=body.use_activation is not False)[0],
        num_inputs=len(pairs),
        field=field,
        id_prefix="score-",
    )


async def _by_angle(exchange: Exchange, body: ScoreBody, served: ServedModel) -> Computed[float]:
    field = body.second_field()
    pairs = body.pairs()
    rules = InputRules(
        lambda index: f"{field}[{index // 2}]",
        vllm_truncation(body, served.card),
        prompt=prompt_text(served.pooling, None),
        how_to_truncate=HOW_TO_TRUNCATE,
    )
    texts = [text for pair in pairs for text in pair]  # equal ones are computed once
    computed = await compute(
        exchange,
        body,
        served,
        lambda: encode_inputs(texts, rules, served),
        Wanted("embed", normalize=True),
        lambda result: result.values,
        num_inputs=len(texts),
        field=field,
        id_prefix="score-",
    )
    vectors = computed.results
    return computed.with_results([cosine(vectors[start], vectors[start + 1]) for start in range(0, len(vectors), 2)])


def _scores(logits: array[float], served: ServedModel, *, is_activated: bool) -> list[float]:
    return activated(logits, served.pooling.activation_of(len(logits)) if is_activated else "none")


def _class(index: int, probs: list[float], served: ServedModel) -> dict[str, Any]:
    best = max(range(len(probs)), key=probs.__getitem__)
    return {"index": index, "label": served.pooling.label(best), "probs": probs, "num_classes": len(probs)}


async def _respond(exchange: Exchange, computed: Computed[Any], served: ServedModel, *data: bytes) -> None:
    """Answer with vLLM's list around the data, a JSON array in parts."""
    head = msgspec.json.encode(
        {
            "id": computed.request_id,
            "object": "list",
            "created": computed.created,
            "model": served.card.model_id,
            "usage": computed.usage(),
        }
    )
    await exchange.respond_in_parts(200, [head[:-1] + b',"data":', *data, b"}"], computed.headers())
