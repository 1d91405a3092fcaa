"""POST /tokenize, /detokenize and /apply-template: tokens of a text or chat, text of tokens, a chat's prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from urllib.parse import parse_qs

import msgspec

from penstock.frontend.endpoints.context import EndpointContext, run_sized
from penstock.frontend.endpoints.pooling import tei_tokens
from penstock.frontend.endpoints.prompts import PIECE_TOKENS, check_length, check_token_ids, render_chat, render_text
from penstock.frontend.generation.models.model_table import Task
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.decoding import decode_chat
from penstock.frontend.schemas.pooling.tei import TeiTokenizeBody, decode_tei_tokenize, is_tei_tokenize
from penstock.frontend.schemas.utilities import TokenizeBody, decode_detokenize, decode_tokenize
from penstock.frontend.text.chat_template import special_tokens_of
from penstock.frontend.transport.errors import TEI_FORMAT
from penstock.frontend.transport.exchange import Exchange

_PRIVATE = ("name_or_path", "vocab_file", "merges_file", "tokenizer_file")
"""Paths on the machine where the tokenizer was saved."""
_INLINE_TOKENS = 1024
"""More tokens are decoded, or described one by one, in a thread."""


async def tokenize(exchange: Exchange, context: EndpointContext) -> None:
    """POST /tokenize: as in vLLM; with `content`, as in llama.cpp; with `inputs`, as in TEI.

    Raises ApiError, ClientGoneError.
    """

    def decode(data: bytes) -> TeiTokenizeBody | tuple[TokenizeBody, ChatBody | None]:
        if is_tei_tokenize(data):
            exchange.error_format = TEI_FORMAT
            return decode_tei_tokenize(data)
        return decode_tokenize(data)

    def model_of(decoded: TeiTokenizeBody | tuple[TokenizeBody, ChatBody | None]) -> str | None:
        return decoded.model if isinstance(decoded, TeiTokenizeBody) else decoded[0].model

    def task_of(decoded: TeiTokenizeBody | tuple[TokenizeBody, ChatBody | None]) -> Task:
        return context.models.tei_task(decoded.model) if isinstance(decoded, TeiTokenizeBody) else "any"

    decoded, served, _ = await context.receive(exchange, decode, task=task_of, model_of=model_of)
    if isinstance(decoded, TeiTokenizeBody):
        await tei_tokens.answer_tokenize(exchange, decoded, served)
        return
    body, chat = decoded
    async with exchange.cancelled_on_disconnect():
        if body.content is None:
            answer = await _vllm_answer(body, chat, served, exchange.tenant)
        else:
            answer = await _llama_cpp_answer(body, body.content, served)
        await exchange.respond_in_parts(200, answer)


async def detokenize(exchange: Exchange, context: EndpointContext) -> None:
    """POST /detokenize: the text under vLLM's name and under llama.cpp's. Raises ApiError, ClientGoneError."""
    body, served, _ = await context.receive(exchange, decode_detokenize, model_of=lambda body: body.model)
    async with exchange.cancelled_on_disconnect():

        def write() -> bytes:
            check_token_ids("tokens", body.tokens, served.card)
            text = served.tokenizer.decode(body.tokens, skip_special_tokens=False)
            return msgspec.json.encode({"prompt": text, "content": text})

        await exchange.respond(200, await asyncio.to_thread(write) if len(body.tokens) > _INLINE_TOKENS else write())


async def apply_template(exchange: Exchange, context: EndpointContext) -> None:
    """POST /apply-template: a chat request's prompt as text. Raises ApiError, ClientGoneError."""
    body, served, _ = await context.receive(exchange, decode_chat, model_of=lambda body: body.model)
    async with exchange.cancelled_on_disconnect():
        text = (await render_text(body, served, is_long=True)).plain
        await exchange.respond(200, await run_sized(len(text), msgspec.json.encode, {"prompt": text}))


async def tokenizer_info(exchange: Exchange, context: EndpointContext) -> None:
    """GET /tokenizer_info: tokenizer_config.json, with the chat template in use. Raises ApiError, ClientGoneError."""
    requested = parse_qs(exchange.query.decode("latin-1")).get("model", [None])[0]
    tokenizer = (await context.model_soon(exchange, "any", requested)).tokenizer
    template = None if tokenizer.chat_template is None else tokenizer.chat_template.source
    own = {name: value for name, value in tokenizer.config.items() if value is not None and name not in _PRIVATE}
    # lm-eval takes special tokens as texts; in the file some are objects.
    info = {"tokenizer_class": "PreTrainedTokenizerFast"} | own | special_tokens_of(tokenizer.config)
    await exchange.respond(200, msgspec.json.encode(info | {"chat_template": template}))


async def _vllm_answer(body: TokenizeBody, chat: ChatBody | None, served: ServedModel, tenant: bytes) -> list[bytes]:
    if chat is not None:
        token_ids = (await render_chat(chat, served, tenant, is_long=True)).token_ids
    else:
        with_special = body.add_special_tokens is not False
        token_ids = await _encode(served, body.prompt or "", add_special_tokens=with_special)
    strings = [b"null"]
    if body.return_token_strs:
        strings = await _each(token_ids, partial(_text, served))
    head = b'{"count":%d,"max_model_len":%d,"tokens":' % (len(token_ids), served.card.max_context_tokens)
    return [head, *await _numbers(token_ids), b',"token_strs":', *strings, b"}"]


async def _llama_cpp_answer(body: TokenizeBody, content: str, served: ServedModel) -> list[bytes]:
    tokenizer, add_special = served.tokenizer, body.add_special is True
    if body.parse_special is False:
        check_length("content", [content], served)
        (token_ids,) = await tokenizer.encode_as_text([content], tokenizer.spellings(), add_special_tokens=add_special)
    else:
        token_ids = await _encode(served, content, add_special_tokens=add_special)
    if body.with_pieces:
        tokens = await _each(token_ids, lambda token_id: {"id": token_id, "piece": _piece(served, token_id)})
    else:
        tokens = await _numbers(token_ids)
    return [b'{"tokens":', *tokens, b"}"]


async def _encode(served: ServedModel, text: str, *, add_special_tokens: bool) -> list[int]:
    return (await served.tokenizer.encode([text], add_special_tokens=add_special_tokens))[0]


async def _each(token_ids: list[int], describe: Callable[[int], object]) -> list[bytes]:
    """Return a JSON array, in parts, of each token's description. Every distinct token is described once."""
    described: dict[int, bytes] = {}

    def join(piece: list[int]) -> bytes:
        for token_id in set(piece) - described.keys():
            described[token_id] = msgspec.json.encode(describe(token_id))
        return b",".join(map(described.__getitem__, piece))

    return await _array(token_ids, join)


async def _numbers(token_ids: list[int]) -> list[bytes]:
    return await _array(token_ids, lambda piece: msgspec.json.encode(piece)[1:-1])


async def _array(token_ids: list[int], join: Callable[[list[int]], bytes]) -> list[bytes]:
    """Return a JSON array in parts. join writes some elements with commas between them.

    One call of C code over millions of tokens would hold the interpreter's lock, and so the event loop, throughout.
    Joining the parts would too.
    """

    def parts() -> list[bytes]:
        joined = []
        for start in range(0, len(token_ids), PIECE_TOKENS):
            joined += [b",", join(token_ids[start : start + PIECE_TOKENS])]
        return [b"[", *joined[1:], b"]"]

    return await asyncio.to_thread(parts) if len(token_ids) > _INLINE_TOKENS else parts()


def _text(served: ServedModel, token_id: int) -> str:
    return served.tokenizer.token_bytes(token_id).decode(errors="replace")


def _piece(served: ServedModel, token_id: int) -> str | list[int]:
    """Return the token's text, or its bytes if they are part of a character."""
    raw = served.tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
