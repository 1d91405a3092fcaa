"""POST /predict and TEI's /rerank: classes of texts and pairs, and the order of texts for a query."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.pooling.computing import compute, encode_pairs, names_of
from penstock.frontend.endpoints.pooling.tei_embed import tei_headers, tei_rules
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.submission.pooled_inputs import encode_inputs
from penstock.frontend.generation.submission.pooled_run import Wanted
from penstock.frontend.generation.submission.pooled_scores import activated, ranked, sigmoid
from penstock.frontend.schemas.pooling.tei import PredictBody, TeiRerankBody, decode_predict
from penstock.frontend.transport.exchange import Exchange


async def predict(exchange: Exchange, context: EndpointContext) -> None:
    """POST /predict: the classes of each input, the likeliest first. Raises ApiError, ClientGoneError."""
    body, served, _ = await context.receive_body(exchange, decode_predict, "classify")
    await answer_predict(exchange, body, served)


async def answer_predict(exchange: Exchange, body: PredictBody, served: ServedModel) -> None:
    """Answer /predict. Raises ApiError, ClientGoneError."""
    items = body.items()
    computed = await compute(
        exchange,
        body,
        served,
        lambda: encode_inputs(items, tei_rules(body, served, names_of("inputs", is_list=body.is_batch())), served),
        Wanted("classify"),
        lambda result: activated(
            result.values, "none" if body.raw_scores else served.pooling.activation_of(len(result.values))
        ),
        num_inputs=len(items),
        field="inputs",
        id_prefix="predict-",
    )
    predictions = [
        [{"score": scores[index], "label": served.pooling.label(index)} for index in ranked(scores)]
        for scores in computed.results
    ]
    answer = msgspec.json.encode(predictions if body.is_batch() else predictions[0])
    num_characters = sum(len(item) if isinstance(item, str) else sum(map(len, item)) for item in items)
    await exchange.respond(200, answer, tei_headers(computed, num_characters))


async def answer_rerank(exchange: Exchange, body: TeiRerankBody, served: ServedModel) -> None:
    """Answer TEI's /rerank. Raises ApiError, ClientGoneError."""
    pairs = [(body.query, text) for text in body.texts]
    computed = await compute(
        exchange,
        body,
        served,
        lambda: encode_pairs(pairs, tei_rules(body, served, names_of("texts", is_list=True)), served, body.instruction),
        Wanted("classify"),
        lambda result: result.values[0] if body.raw_scores else sigmoid(result.values[0]),
        num_inputs=len(pairs),
        field="texts",
        id_prefix="rerank-",
    )
    ranks: list[dict[str, Any]] = []
    for index in ranked(computed.results):
        shown = {"text": body.texts[index]} if body.return_text else {}
        ranks.append({"index": index, **shown, "score": computed.results[index]})
    num_characters = sum(len(query) + len(text) for query, text in pairs)
    await exchange.respond(200, msgspec.json.encode(ranks), tei_headers(computed, num_characters))
