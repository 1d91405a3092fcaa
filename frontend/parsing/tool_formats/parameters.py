"""Reads arguments that a model writes one by one, as tagged text, and emits them as a JSON object while they arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.frontend.parsing.tool_formats.parameter_types import TEXT, as_json, json_string, parameter_types

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.frontend.parsing.parsed_output import ParsedOutput
    from penstock.frontend.parsing.reader import Reader, Reading
    from penstock.frontend.parsing.tool_formats.base import ParameterLayout


class ParameterReader:
    """Reads the parameters of one call. A text streams; any other value is emitted when it is complete."""

    def __init__(self, output: ParsedOutput, name: str, schema: Mapping[str, Any], layout: ParameterLayout) -> None:
        """Begin the call. schema describes its arguments; an empty one allows everything."""
        self._emit = output.arguments
        self._schema = schema
        self._layout = layout
        self._before_key = "{"
        output.begin_call(name)

    def read(self, reader: Reader, key: str, *, is_text: bool = False) -> Reading[None]:
        """Read a value and its closing mark. Raises Malformed if the text ends before that.

        is_text: the model marks the value as a text. It is one if the schema allows a text.
        """
        layout = self._layout
        types = parameter_types(self._schema, key)
        if is_text and types >= TEXT:
            types = TEXT
        name = f"{self._before_key}{json_string(key)}: "
        self._before_key = ", "
        parts: list[str] = []
        if types == TEXT:
            self._emit(f'{name}"')
        emit: Callable[[str], object] = self._emit_text if types == TEXT else parts.append
        if layout.is_indented:
            yield from reader.accept("\n")
            emit = _without_last_line_break(emit)
        yield from reader.until(layout.closing, emit, keeps_partial=False)
        yield from reader.expect(layout.closing)
        self._emit('"' if types == TEXT else name + as_json("".join(parts), types))

    def end(self) -> None:
        """End the object: the call is complete."""
        self._emit("{}" if self._before_key == "{" else "}")

    def _emit_text(self, text: str) -> None:
        self._emit(json_string(text)[1:-1])


def _without_last_line_break(emit: Callable[[str], object]) -> Callable[[str], object]:
    """Return an emitter of a text in pieces. It drops a line break at the text's end."""
    held = ""

    def emit_rest(piece: str) -> None:
        nonlocal held
        text = held + piece
        held = "\n" if text.endswith("\n") else ""
        if rest := text.removesuffix("\n"):
            emit(rest)

    return emit_rest
