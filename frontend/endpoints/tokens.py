"""POST /tokenize, /detokenize and /apply-template: tokens of a text or chat, text of tokens, a chat's prompt."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.frontend.endpoints.models import check_model
from penstock.frontend.endpoints.prompts import render_chat, render_text
from penstock.frontend.schemas.decoding import decode_chat
from penstock.frontend.schemas.utilities import decode_detokenize, decode_tokenize
from penstock.frontend.transport.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.frontend.endpoints.context import EndpointContext
    from penstock.frontend.generation.served_model import ServedModel
    from penstock.frontend.schemas.chat import ChatBody
    from penstock.frontend.schemas.utilities import TokenizeBody
    from penstock.frontend.transport.exchange import Exchange

_INLINE_TOKENS = 1024
"""More tokens are decoded, or described one by one, in a thread."""


async def tokenize(exchange: Exchange, context: EndpointContext) -> None:
    """POST /tokenize, as vLLM has it; with `content` as llama.cpp has it. Raises ApiError, ClientGoneError."""
    data, served = await context.receive(exchange)
    async with exchange.cancelled_on_disconnect():
        body, chat = decode_tokenize(data)
        check_model(body.model, served.card)
        if body.content is None:
            answer = await _vllm_answer(body, chat, served)
        else:
            answer = await _llama_cpp_answer(body, body.content, served)
        await _respond(exchange, answer)


async def detokenize(exchange: Exchange, context: EndpointContext) -> None:
    """POST /detokenize: the text under vLLM's name and under llama.cpp's. Raises ApiError, ClientGoneError."""
    data, served = await context.receive(exchange)
    async with exchange.cancelled_on_disconnect():
        body = decode_detokenize(data)
        check_model(body.model, served.card)
        largest = max(body.tokens, default=0)
        if largest >= served.card.vocab_size:
            invalid("tokens", f"token id {largest} is outside the vocabulary of {served.card.vocab_size}")
        decode = partial(served.tokenizer.decode, body.tokens, skip_special_tokens=False)
        text = await asyncio.to_thread(decode) if len(body.tokens) > _INLINE_TOKENS else decode()
        await _respond(exchange, {"prompt": text, "content": text})


async def apply_template(exchange: Exchange, context: EndpointContext) -> None:
    """POST /apply-template: a chat request's prompt as text. Raises ApiError, ClientGoneError."""
    data, served = await context.receive(exchange)
    async with exchange.cancelled_on_disconnect():
        body = decode_chat(data)
        check_model(body.model, served.card)
        await _respond(exchange, {"prompt": await render_text(body, served, is_long=True)})


async def _vllm_answer(body: TokenizeBody, chat: ChatBody | None, served: ServedModel) -> dict[str, Any]:
    if chat is not None:
        token_ids = await render_chat(chat, served, is_long=True)
    else:
        with_special = body.add_special_tokens is not False
        token_ids = await _encode(served, body.prompt or "", add_special_tokens=with_special)
    return {
        "count": len(token_ids),
        "max_model_len": served.card.max_context_tokens,
        "tokens": token_ids,
        "token_strs": await _each(token_ids, partial(_text, served)) if body.return_token_strs else None,
    }


async def _llama_cpp_answer(body: TokenizeBody, content: str, served: ServedModel) -> dict[str, Any]:
    token_ids = await _encode(served, content, add_special_tokens=body.add_special is True)
    tokens: Any = token_ids
    if body.with_pieces:
        tokens = await _each(token_ids, lambda token_id: {"id": token_id, "piece": _piece(served, token_id)})
    return {"tokens": tokens}


async def _encode(served: ServedModel, text: str, *, add_special_tokens: bool) -> list[int]:
    return (await served.tokenizer.encode([text], add_special_tokens=add_special_tokens))[0]


async def _each(token_ids: list[int], describe: Callable[[int], object]) -> msgspec.Raw:
    """Return a JSON array of each token's description. Every distinct token is described once."""

    def join() -> msgspec.Raw:
        described = {token_id: msgspec.json.encode(describe(token_id)) for token_id in set(token_ids)}
        return msgspec.Raw(b"[%b]" % b",".join(map(described.__getitem__, token_ids)))

    return await asyncio.to_thread(join) if len(token_ids) > _INLINE_TOKENS else join()


def _text(served: ServedModel, token_id: int) -> str:
    return served.tokenizer.token_bytes(token_id).decode(errors="replace")


def _piece(served: ServedModel, token_id: int) -> str | list[int]:
    """Return the token's text, or its bytes when it is part of a character."""
    raw = served.tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


async def _respond(exchange: Exchange, answer: dict[str, Any]) -> None:
    await exchange.respond(200, msgspec.json.encode(answer))
