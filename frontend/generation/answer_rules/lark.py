"""Parts of llguidance's Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.frontend.parsing.tool_formats.base import CALL_NUMBER

_WHITESPACE = r" ?|\n {0,24}"
"""Allowed between the parts of a JSON text: one line or indented, as models write it, and bounded."""
_NUMBER = "/[0-9]{1,4}/"


class MarkedText:
    """Writes texts as Lark, with markers as the tokens that they are: to a model, their single characters are different
    text.

    `CALL_NUMBER` becomes any number.
    """

    def __init__(self, markers: tuple[str, ...], added_tokens: Mapping[str, int]) -> None:
        ids = {marker: added_tokens[marker] for marker in markers if marker in added_tokens}
        self._symbols = {CALL_NUMBER: _NUMBER} | {marker: f"<[{token_id}]>" for marker, token_id in ids.items()}
        self._symbol = re.compile("|".join(map(re.escape, self._symbols)))
        self._markers = markers
        self._marker = re.compile("|".join(map(re.escape, ids))) if ids else None

    def __call__(self, text: str) -> str:
        parts: list[str] = []
        position = 0
        for symbol in self._symbol.finditer(text):
            parts += (literal(text[position : symbol.start()]), self._symbols[symbol[0]])
            position = symbol.end()
        parts.append(literal(text[position:]))
        return " ".join(part for part in parts if part != '""')

    @property
    def has_all_markers(self) -> bool:
        """Whether each marker is a token."""
        return all(marker in self._symbols for marker in self._markers)

    def split(self, text: str) -> tuple[str, str]:
        """Split a text before its first marker that is a token. The second part is empty if there is none."""
        marker = None if self._marker is None else self._marker.search(text)
        return (text, "") if marker is None else (text[: marker.start()], text[marker.start() :])


def literal(text: str) -> str:
    """Return a Lark string. A JSON string is one."""
    return msgspec.json.encode(text).decode()


def json_value(schema: Mapping[str, Any]) -> str:
    """Return Lark for a JSON value that the schema accepts."""
    return f"%json {msgspec.json.encode(_with_option(schema, 'whitespace_pattern', _WHITESPACE)).decode()}"


def lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with the mark by which the backend drops keywords that no grammar can express."""
    return _with_option(schema, "lenient", True)


def _with_option(schema: Mapping[str, Any], name: str, value: object) -> dict[str, Any]:
    """Add to llguidance's options of a schema. Invalid options are left to the compiler, which refuses them."""
    options = schema.get("x-guidance", {})
    return {**schema, "x-guidance": {**options, name: value} if isinstance(options, dict) else options}
