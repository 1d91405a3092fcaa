"""Helpers for endpoints that translate their bodies to a chat request."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock.frontend.schemas.chat import ChatMessage
from penstock.frontend.schemas.generation import GenerationBody
from penstock.frontend.transport.errors import ApiError

_OWN = ("response_format", "metadata", "suffix")
_SHARED = tuple(field.name for field in msgspec.structs.fields(GenerationBody) if field.name not in _OWN)


def shared_fields(body: GenerationBody) -> dict[str, Any]:
    """Return the fields that a body has in common with a chat or completion."""
    return {name: getattr(body, name) for name in _SHARED}


def instructed(instructions: str, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Put the instructions into one system message at the start. Many templates accept no second one."""
    first = messages[0] if messages else None
    if first is not None and first.role in ("system", "developer") and isinstance(first.content, str):
        return [ChatMessage("system", f"{instructions}\n\n{first.content}"), *messages[1:]]
    return [ChatMessage("system", instructions), *messages]


@contextlib.contextmanager
def renamed(names: Sequence[tuple[re.Pattern[str], str]]) -> Iterator[None]:
    """Rename the chat request's fields in errors to this endpoint's names for them."""
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        shown = next((pattern.sub(name, param) for pattern, name in names if pattern.search(param)), param)
        if shown == param:
            raise
        message = re.sub(rf"(?<!\w){re.escape(param)}(?!\w)", lambda _: shown, error.message)
        raise ApiError(error.kind, message, param=shown, headers=error.headers, numbers=error.numbers) from None
