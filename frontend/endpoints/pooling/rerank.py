"""POST /v1/rerank, /v2/rerank and /rerank: Cohere's and Jina's rerankers; /rerank is also TEI's.

Without a reranker an embedding model ranks by the angle between query and document, as in vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.pooling import tei_predict
from penstock.frontend.endpoints.pooling.computing import Computed, compute, encode_pairs, names_of, vllm_truncation
from penstock.frontend.generation.models.model_table import ServedModels, Task, can_do
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.submission.pooled_inputs import InputRules, encode_inputs, prompt_text
from penstock.frontend.generation.submission.pooled_run import Wanted
from penstock.frontend.generation.submission.pooled_scores import cosine, ranked, sigmoid
from penstock.frontend.schemas.pooling.rerank import RerankBody, decode_rerank
from penstock.frontend.schemas.pooling.tei import TeiRerankBody, decode_tei_rerank, is_tei_rerank
from penstock.frontend.text.input_encoder import EncodedInput, Truncation
from penstock.frontend.transport.errors import TEI_FORMAT, invalid
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.messages import MAX_CONTEXT_TOKENS, ModelCard

_HOW_TO_TRUNCATE = "truncate true truncates it"


async def rerank(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/rerank and /v2/rerank. Raises ApiError, ClientGoneError."""
    body, served, _ = await context.receive_body(exchange, decode_rerank, lambda body: _task(context.models, body))
    await _answer(exchange, body, served)


async def rerank_either(exchange: Exchange, context: EndpointContext) -> None:
    """POST /rerank: TEI's if the body has texts, else Cohere's. Raises ApiError, ClientGoneError."""

    def decode(data: bytes) -> RerankBody | TeiRerankBody:
        if is_tei_rerank(data):
            exchange.error_format = TEI_FORMAT
            return decode_tei_rerank(data)
        return decode_rerank(data)

    def task_of(body: RerankBody | TeiRerankBody) -> Task:
        return "rerank" if isinstance(body, TeiRerankBody) else _task(context.models, body)

    body, served, _ = await context.receive_body(exchange, decode, task_of)
    if isinstance(body, TeiRerankBody):
        await tei_predict.answer_rerank(exchange, body, served)
    else:
        await _answer(exchange, body, served)


def _task(models: ServedModels, body: RerankBody) -> Task:
    """A reranker comes before an embedding model, unless the request names one."""
    has_reranker = any(can_do(served.card, "rerank") for served in models.loaded())
    return "rerank" if body.model is None and has_reranker else "score"


async def _answer(exchange: Exchange, body: RerankBody, served: ServedModel) -> None:
    computed = await (_by_pair if can_do(served.card, "rerank") else _by_angle)(exchange, body, served)
    shown = body.texts() if body.return_documents else None
    answer = _encoded(computed, body.top_n, shown, served.card.model_id, "2" if exchange.path == "/v2/rerank" else "1")
    await exchange.respond(200, answer, computed.headers())


async def _by_pair(exchange: Exchange, body: RerankBody, served: ServedModel) -> Computed[float]:
    rules = InputRules(
        names_of("documents", is_list=True),
        _truncation(body, served.card),
        how_to_truncate=_HOW_TO_TRUNCATE,
        may_truncate=body.truncate is not False,
    )
    pairs = [(body.query, text) for text in body.texts()]
    return await compute(
        exchange,
        body,
        served,
        lambda: encode_pairs(pairs, rules, served, body.instruction),
        Wanted("classify"),
        lambda result: result.values[0] if body.use_activation is False else sigmoid(result.values[0]),
        num_inputs=len(pairs),
        field="documents",
        id_prefix="rerank-",
    )


async def _by_angle(exchange: Exchange, body: RerankBody, served: ServedModel) -> Computed[float]:
    if body.instruction is not None:
        invalid("instruction", "this model takes no instruction")
    texts, whole, prompts = body.texts(), _truncation(body, served.card), served.pooling.prompts
    short = replace(
        whole, max_tokens=min(body.max_tokens_per_doc or MAX_CONTEXT_TOKENS, served.card.max_context_tokens)
    )
    of_documents = short if body.max_tokens_per_doc else whole

    async def encode() -> list[EncodedInput]:
        encoded: list[EncodedInput] = []
        for field, given, name, each in (
            ("query", [body.query], "query", whole),
            ("documents", texts, "document", of_documents),
        ):
            prompt = prompt_text(served.pooling, name if name in prompts else None)
            rules = InputRules(
                names_of(field, is_list=given is texts),
                each,
                prompt=prompt,
                how_to_truncate=_HOW_TO_TRUNCATE,
                may_truncate=body.truncate is not False,
            )
            encoded += await encode_inputs(given, rules, served)
        return encoded

    computed = await compute(
        exchange,
        body,
        served,
        encode,
        Wanted("embed", normalize=True),
        lambda result: result.values,
        num_inputs=1 + len(texts),
        field="documents",
        id_prefix="rerank-",
    )
    query, *documents = computed.results
    return computed.with_results([cosine(query, document) for document in documents])


def _truncation(body: RerankBody, card: ModelCard) -> Truncation:
    truncation = vllm_truncation(body, card, body.max_tokens_per_doc)
    if body.truncate and truncation.max_tokens is None:
        return Truncation(card.max_context_tokens, truncation.side, truncation.max_second_tokens)
    return truncation


def _encoded(computed: Computed[float], top_n: int | None, texts: list[str] | None, model: str, version: str) -> bytes:
    """Return the answer with the fields of Cohere, Jina and vLLM together."""
    results: list[dict[str, Any]] = []
    for index in ranked(computed.results, top_n):
        shown = {} if texts is None else {"document": {"text": texts[index]}}
        results.append({"index": index, "relevance_score": computed.results[index], **shown})
    meta = {"api_version": {"version": version}, "tokens": {"input_tokens": computed.num_tokens}}
    return msgspec.json.encode(
        {
            "id": computed.request_id,
            "object": "list",
            "model": model,
            "results": results,
            "usage": computed.usage(),
            "meta": meta,
        }
    )
