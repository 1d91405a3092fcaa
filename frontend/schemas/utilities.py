"""POST /tokenize, /detokenize and /apply-template, with vLLM's field names and with llama.cpp's."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from penstock.frontend.schemas.chat import ChatBody, ChatMessage, ChatTool
from penstock.frontend.schemas.decoding import decode_body, decode_chat
from penstock.frontend.schemas.generation import ShortText
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid
from penstock.shm.messages import TokenId

MAX_TOKENS = 1 << 20
"""Tokens of one request to /detokenize."""


class TokenizeBody(Struct, kw_only=True):
    """prompt or messages as in vLLM, or content as in llama.cpp."""

    model: ShortText | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=2048)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    tools: Annotated[list[ChatTool], Meta(max_length=128)] | None = None

    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    model: ShortText | None = None


class ModelCommandBody(Struct, kw_only=True):
    model: ShortText
    """The model's name."""


class UnloadAdapterBody(Struct, kw_only=True):
    lora_name: ShortText


class LoadAdapterBody(UnloadAdapterBody, kw_only=True):
    lora_path: Annotated[str, Meta(min_length=1, max_length=1024)]
    """A directory in the server's --lora-dir."""
    base_model_name: ShortText | None = None


_load_adapter = msgspec.json.Decoder(LoadAdapterBody)
_unload_adapter = msgspec.json.Decoder(UnloadAdapterBody)
_model_command = msgspec.json.Decoder(ModelCommandBody)
_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)
_SOURCES = ("prompt", "messages", "content")


def decode_model_command(data: bytes) -> ModelCommandBody:
    """Raises ApiError naming the field."""
    return decode_body(_model_command, data)


def decode_load_adapter(data: bytes) -> LoadAdapterBody:
    """Raises ApiError naming the field."""
    return decode_body(_load_adapter, data)


def decode_unload_adapter(data: bytes) -> UnloadAdapterBody:
    """Raises ApiError naming the field."""
    return decode_body(_unload_adapter, data)


def decode_tokenize(data: bytes) -> tuple[TokenizeBody, ChatBody | None]:
    """Return the body, and the same body as a chat if it has messages.

    Raises ApiError naming the field, its value and the limit.
    """
    body = decode_body(_tokenize, data)
    given = [field for field in _SOURCES if getattr(body, field) is not None]
    if not given:
        raise ApiError(ErrorKind.MISSING_FIELD, "prompt: required, or messages, or content", param="prompt")
    if len(given) > 1:
        invalid(given[1], f"cannot be combined with {given[0]}")
    return body, None if body.messages is None else decode_chat(data)


def decode_detokenize(data: bytes) -> DetokenizeBody:
    """Raises ApiError naming the field, its value and the limit."""
    return decode_body(_detokenize, data)
