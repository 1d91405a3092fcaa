"""Parts of llguidance's Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

_WHITESPACE = r" ?|\n {0,24}"
"""Allowed between the parts of a JSON text: one line or indented, as models write it, and bounded."""


class MarkedText:
    """Writes texts as Lark, with the markers that are tokens as those tokens: to a model, their single characters are
    a different text."""

    def __init__(self, markers: tuple[str, ...], added_tokens: Mapping[str, int]) -> None:
        self._ids = {marker: added_tokens[marker] for marker in markers if marker in added_tokens}
        self._pattern = "|".join(map(re.escape, self._ids))

    def __call__(self, text: str) -> str:
        parts = re.split(f"({self._pattern})", text) if self._ids else [text]
        return " ".join(self._part(part, is_marker=index % 2 == 1) for index, part in enumerate(parts) if part)

    def is_token(self, text: str) -> bool:
        return text in self._ids

    def _part(self, part: str, *, is_marker: bool) -> str:
        return f"<[{self._ids[part]}]>" if is_marker else literal(part)


def literal(text: str) -> str:
    """Return a Lark string. A JSON string is one."""
    return msgspec.json.encode(text).decode()


def json_value(schema: Mapping[str, Any]) -> str:
    """Return Lark for a JSON value that is valid by the schema."""
    spaced = {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}
    return f"%json {msgspec.json.encode(spaced).decode()}"
