"""POST /v1/rerank, /v2/rerank and /rerank: Cohere's and Jina's rerankers; /rerank is also TEI's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from penstock.frontend.endpoints.pooling import tei_predict
from penstock.frontend.endpoints.pooling.computing import compute, encode_pairs, names_of, vllm_truncation
from penstock.frontend.generation.submission.pooled_inputs import InputRules
from penstock.frontend.generation.submission.pooled_run import Wanted
from penstock.frontend.generation.submission.pooled_scores import ranked, sigmoid
from penstock.frontend.schemas.pooling.rerank import RerankBody, decode_rerank
from penstock.frontend.schemas.pooling.tei import TeiRerankBody, decode_tei_rerank, is_tei_rerank
from penstock.frontend.text.input_encoder import Truncation
from penstock.frontend.transport.errors import TEI_FORMAT

if TYPE_CHECKING:
    from penstock.frontend.endpoints.context import EndpointContext
    from penstock.frontend.endpoints.pooling.computing import Computed
    from penstock.frontend.generation.models.served_model import ServedModel
    from penstock.frontend.transport.exchange import Exchange


async def rerank(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/rerank and /v2/rerank. Raises ApiError, ClientGoneError."""
    body, served, _ = await context.receive_body(exchange, decode_rerank, "rerank")
    await _answer(exchange, body, served)


async def rerank_either(exchange: Exchange, context: EndpointContext) -> None:
    """POST /rerank: TEI's if the body has texts, else Cohere's. Raises ApiError, ClientGoneError."""

    def decode(data: bytes) -> RerankBody | TeiRerankBody:
        if is_tei_rerank(data):
            exchange.error_format = TEI_FORMAT
            return decode_tei_rerank(data)
        return decode_rerank(data)

    body, served, _ = await context.receive_body(exchange, decode, "rerank")
    if isinstance(body, TeiRerankBody):
        await tei_predict.answer_rerank(exchange, body, served)
    else:
        await _answer(exchange, body, served)


async def _answer(exchange: Exchange, body: RerankBody, served: ServedModel) -> None:
    rules = InputRules(
        names_of("documents", is_list=True),
        _truncation(body, served),
        how_to_truncate="truncate true truncates it",
    )
    texts = body.texts()
    pairs = [(body.query, text) for text in texts]
    computed = await compute(
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
    shown = texts if body.return_documents else None
    answer = _encoded(computed, body.top_n, shown, served.card.model_id, "2" if exchange.path == "/v2/rerank" else "1")
    await exchange.respond(200, answer, computed.headers())


def _truncation(body: RerankBody, served: ServedModel) -> Truncation:
    truncation = vllm_truncation(body, served, body.max_tokens_per_doc)
    if body.truncate and truncation.max_tokens is None:
        return Truncation(served.card.max_context_tokens, truncation.side, truncation.max_second_tokens)
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
