"""TEI's /tokenize, and POST /decode: tokens with their places in the text, and back."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.prompts import check_token_ids
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.submission.pooled_inputs import prompt_text
from penstock.frontend.schemas.pooling.tei import DecodeBody, TeiTokenizeBody, decode_decode
from penstock.frontend.transport.exchange import Exchange


async def answer_tokenize(exchange: Exchange, body: TeiTokenizeBody, served: ServedModel) -> None:
    """Answer TEI's /tokenize. Raises ApiError, ClientGoneError."""
    prompt = prompt_text(served.pooling, body.prompt_name)
    texts = [prompt + text for text in ([body.inputs] if isinstance(body.inputs, str) else body.inputs)]

    def write() -> list[bytes]:
        parts = []
        for index, text in enumerate(texts):
            tokens = served.tokenizer.located_tokens(text, add_special_tokens=body.add_special_tokens is not False)
            parts += [b"," if index else b"[", msgspec.json.encode([_described(token) for token in tokens])]
        return [*parts, b"]"]

    async with exchange.cancelled_on_disconnect():
        answer = await asyncio.to_thread(write)
    await exchange.respond_in_parts(200, answer)


async def decode(exchange: Exchange, context: EndpointContext) -> None:
    """POST /decode: the text of each list of token ids. Raises ApiError, ClientGoneError."""
    body, served, _ = await context.receive(
        exchange,
        decode_decode,
        task=lambda body: context.models.tei_task(body.model),
        model_of=lambda body: body.model,
    )
    async with exchange.cancelled_on_disconnect():
        answer = await asyncio.to_thread(partial(_texts, body, served))
    await exchange.respond(200, answer)


def _texts(body: DecodeBody, served: ServedModel) -> bytes:
    lists = body.lists()
    for index, token_ids in enumerate(lists):
        if token_ids:
            check_token_ids(f"ids[{index}]" if len(lists) > 1 else "ids", token_ids, served.card)
    skips = body.skip_special_tokens is not False
    return msgspec.json.encode([served.tokenizer.decode(each, skip_special_tokens=skips) for each in lists])


def _described(token: tuple[int, str, int | None, int | None]) -> dict[str, Any]:
    token_id, text, start, stop = token
    return {"id": token_id, "text": text, "special": start is None, "start": start, "stop": stop}
