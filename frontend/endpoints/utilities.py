"""What is asked beside answers: tokens of a text, text of tokens, a rendered prompt, the version, the load."""

from __future__ import annotations

import asyncio
import importlib.metadata
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.frontend.endpoints.completions import check_model, render_chat, render_text
from penstock.frontend.schemas.decoding import decode_chat
from penstock.frontend.schemas.utilities import decode_detokenize, decode_tokenize
from penstock.frontend.transport.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.frontend.generation.served_model import ServedModel
    from penstock.frontend.transport.exchange import Exchange
    from penstock.shm.client import BackendClient

VERSION = importlib.metadata.version("penstock")

_INLINE_TOKENS = 1024
"""More are decoded, or told one by one, in a thread."""
_LOAD_COUNTERS = ("running", "waiting", "pages_used", "pages_total")


async def tokenize(exchange: Exchange, data: bytes, served: ServedModel) -> None:
    """POST /tokenize. Raises ApiError."""
    body, chat = decode_tokenize(data)
    check_model(body.model, served.card)
    if body.content is not None:
        token_ids = await _encode(served, body.content, add_special_tokens=body.add_special is True)
        tokens: Any = token_ids
        if body.with_pieces:
            tokens = await _each(token_ids, lambda token_id: {"id": token_id, "piece": _piece(served, token_id)})
        await _respond(exchange, {"tokens": tokens})
        return
    if chat is not None:
        token_ids = await render_chat(chat, served, is_long=True)
    else:
        with_special = body.add_special_tokens is not False
        token_ids = await _encode(served, body.prompt or "", add_special_tokens=with_special)
    told: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": served.card.max_context_tokens,
        "tokens": token_ids,
        "token_strs": await _each(token_ids, partial(_text, served)) if body.return_token_strs else None,
    }
    await _respond(exchange, told)


async def detokenize(exchange: Exchange, data: bytes, served: ServedModel) -> None:
    """POST /detokenize: the text under vLLM's name and under llama.cpp's. Raises ApiError."""
    body = decode_detokenize(data)
    check_model(body.model, served.card)
    largest = max(body.tokens, default=0)
    if largest >= served.card.vocab_size:
        invalid("tokens", f"token id {largest} is outside the vocabulary of {served.card.vocab_size}")

    def decode() -> str:
        return served.tokenizer.decode(body.tokens, skip_special_tokens=False)

    text = await asyncio.to_thread(decode) if len(body.tokens) > _INLINE_TOKENS else decode()
    await _respond(exchange, {"prompt": text, "content": text})


async def apply_template(exchange: Exchange, data: bytes, served: ServedModel) -> None:
    """POST /apply-template: a chat request's prompt as text. Raises ApiError."""
    body = decode_chat(data)
    check_model(body.model, served.card)
    await _respond(exchange, {"prompt": await render_text(body, served, is_long=True)})


async def version(exchange: Exchange) -> None:
    """GET /version."""
    await _respond(exchange, {"version": VERSION})


async def load(exchange: Exchange, backend: BackendClient, num_open: int) -> None:
    """GET /v1/load: requests of this worker, and the whole system's sequences and pages."""
    counters = backend.backend_counters or {}
    told = {"server_load": num_open} | {name: counters[name] for name in _LOAD_COUNTERS if name in counters}
    await _respond(exchange, told)


async def _encode(served: ServedModel, text: str, *, add_special_tokens: bool) -> list[int]:
    return (await served.tokenizer.encode([text], add_special_tokens=add_special_tokens))[0]


async def _each(token_ids: list[int], tell: Callable[[int], object]) -> msgspec.Raw:
    """An array of what is told of each token, as JSON: made once of each that occurs, and copied."""

    def join() -> msgspec.Raw:
        told = {token_id: msgspec.json.encode(tell(token_id)) for token_id in set(token_ids)}
        return msgspec.Raw(b"[%b]" % b",".join(map(told.__getitem__, token_ids)))

    return await asyncio.to_thread(join) if len(token_ids) > _INLINE_TOKENS else join()


def _text(served: ServedModel, token_id: int) -> str:
    return served.tokenizer.token_bytes(token_id).decode(errors="replace")


def _piece(served: ServedModel, token_id: int) -> str | list[int]:
    """A part of a character is told by its bytes."""
    raw = served.tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


async def _respond(exchange: Exchange, told: dict[str, Any]) -> None:
    await exchange.respond(200, msgspec.json.encode(told))
