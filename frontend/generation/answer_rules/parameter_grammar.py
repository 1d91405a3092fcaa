"""Rules for arguments that a format writes one by one, as tagged text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.frontend.generation.answer_rules.lark import MarkedText, json_value, lenient, literal
from penstock.frontend.parsing.tool_formats.base import ParameterLayout
from penstock.frontend.parsing.tool_formats.parameters import TEXT, resolved, types_of
from penstock.shm.messages import MAX_GRAMMAR_CHARACTERS

_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
"""Keywords that restrict each parameter on its own. One rule per parameter cannot express any other."""
_KEY = re.compile(r"[^<>\n]+")
_ANY_KEY = "/[a-zA-Z0-9_.-]{1,64}/"
_JSON_TYPES = ("null", "boolean", "integer", "number", "array", "object")
_MAX_TEXT_LENGTH = 10_000
"""Longer limits on a text's length are not expressed."""


class ParameterGrammar:
    """Makes the rules for the arguments of all functions of one grammar."""

    def __init__(self, layout: ParameterLayout, text: MarkedText) -> None:
        self.rules: list[str] = []
        self._layout = layout
        self._text = text
        self._middle, self._json_middle = text(layout.middle), text(layout.json_middle or layout.middle)
        self._closing = text(f"{_line_break(layout)}{layout.closing}{layout.gap}")
        self._prefix = ""
        self._is_strict = False
        self._values: dict[tuple[bytes, int, bool], str | None] = {}
        """Rules by schema, and by the root of its references: equal ones share a rule, which keeps the lexer small."""
        self._num_characters = 0

    def arguments(self, schema: Mapping[str, Any], prefix: str, *, is_strict: bool) -> str | None:
        """Return Lark for the declared parameters in their order; new rules have names with the prefix.

        None if the format cannot express the schema: some keywords, names or texts have no form in it. A schema that
        declares no parameters allows any.
        """
        self._prefix, self._is_strict = prefix, is_strict
        rules, values, num_characters = self.rules.copy(), self._values.copy(), self._num_characters
        arguments = self._arguments(schema)
        if arguments is None:  # nothing refers to its rules
            self.rules, self._values, self._num_characters = rules, values, num_characters
        return arguments

    def _arguments(self, schema: Mapping[str, Any]) -> str | None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        # An invalid schema is left to the compiler, which refuses it.
        if not (isinstance(properties, dict) and isinstance(required, list) and isinstance(others, bool)):
            return None
        if not schema.keys() <= _OBJECT_KEYWORDS:
            return None
        if not all(isinstance(key, str) and key in properties for key in required):
            return None
        needed = frozenset(required)
        if not properties and others:
            value = self._value({}, schema)
            return f"({self._text(self._layout.opening)} {_ANY_KEY} {value})*"
        parameters = []
        for key, declared in properties.items():
            value = self._value(declared, schema)
            if value is None or _KEY.fullmatch(key) is None or self._layout.middle[0] in key:
                return None
            opening = self._text(f"{self._layout.opening}{key}")
            parameters.append(f"({opening} {value})" + ("" if key in needed else "?"))
        return " ".join(parameters) or '""'

    def _value(self, declared: object, root: Mapping[str, Any]) -> str | None:
        """Return the rule of a value and the marks around it; None if the format cannot express the schema."""
        encoded = msgspec.json.encode(declared)
        key = (encoded, id(root) if b"$ref" in encoded else 0, self._is_strict)
        is_too_long = self._num_characters > MAX_GRAMMAR_CHARACTERS
        if key not in self._values and not is_too_long:  # each rule with a reference repeats its whole root
            name = f"{self._prefix}_value_{len(self._values)}"
            rules = self._value_rules(name, declared, root)
            self._values[key] = None if rules is None else name
            self.rules += rules or ()
            self._num_characters += sum(map(len, rules or ()))
        return self._values.get(key)

    def _value_rules(self, name: str, declared: object, root: Mapping[str, Any]) -> list[str] | None:
        types = types_of(declared, root)
        if "string" not in types:
            return self._json_rules(name, _rooted(declared, root))
        schema = resolved(declared, root)
        if not isinstance(schema, dict) or _allows_any(schema, root):
            if types == TEXT or not self._layout.json_middle:
                return self._text_rules(name, {})
            other = {"type": _types_of_json(schema, root)}
            either = f"{name}: {name}_text | {name}_value"
            return [either, *self._text_rules(f"{name}_text", {}), *self._json_rules(f"{name}_value", other)]
        if types != TEXT:
            return None
        if schema.keys() <= {"type", "minLength", "maxLength"} and all(
            isinstance(limit, int) and limit >= 0 for keyword, limit in schema.items() if keyword != "type"
        ):
            return self._text_rules(name, schema)
        values = schema["enum"] if "enum" in schema else [schema.get("const")]
        is_writable = isinstance(values, list) and all(
            isinstance(value, str) and self._layout.closing not in value for value in values
        )
        if is_writable and schema.keys() <= {"type", "enum", "const"}:
            return [f"{name}: {self._middle} ({' | '.join(map(literal, values))}) {self._closing}"]
        return None

    def _json_rules(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        value = json_value(schema if self._is_strict else lenient(schema))
        return [f"{name}: {self._json_middle} {name}_json {self._closing}", f"{name}_json: {value}"]

    def _text_rules(self, name: str, limits: Mapping[str, int]) -> list[str]:
        """Return the rule `name` for a text that cannot contain the closing mark, and the marks around it."""
        layout, text = self._layout, self._text
        least, most = limits.get("minLength", 0), limits.get("maxLength", _MAX_TEXT_LENGTH)
        is_unlimited = most >= _MAX_TEXT_LENGTH
        length = "*" if is_unlimited and not least else f"{{{least},{'' if is_unlimited else most}}}"
        line_break = r"\n" if layout.is_indented else ""
        terminal, gap = name.upper(), text(layout.gap)
        before, token = text.split(layout.closing)
        ending = line_break + (_escaped(before) if token else "")
        content = f"{terminal}: /(.|\\n){length}{ending}/ & ~/(.|\\n)*{_escaped(layout.closing)}(.|\\n)*/"
        if token:  # no text contains it
            return [f"{name}: {self._middle} {terminal} {text(token)} {gap}", content]
        closed = f"{name}_closed[suffix={literal(layout.closing)}]: {terminal}"
        return [f"{name}: {self._middle} {name}_closed {gap}", closed, content]


def _allows_any(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether each value of the schema's types is valid."""
    if schema.keys() != {"anyOf"}:
        return schema.keys() <= {"type"}
    if not isinstance(schema["anyOf"], list):
        return False
    branches = (resolved(branch, root) for branch in schema["anyOf"])
    return all(isinstance(branch, dict) and branch.keys() <= {"type"} for branch in branches)


def _types_of_json(schema: object, root: Mapping[str, Any]) -> list[str]:
    """Return the types other than string that a schema allows, if it limits nothing but types."""
    branches = schema.get("anyOf", [schema]) if isinstance(schema, dict) else [{}]
    names: set[str] = set()
    for branch in (resolved(branch, root) for branch in branches):
        declared = branch.get("type", _JSON_TYPES) if isinstance(branch, dict) else _JSON_TYPES
        names.update([declared] if isinstance(declared, str) else declared)
    return [name for name in _JSON_TYPES if name in names]


def _line_break(layout: ParameterLayout) -> str:
    return "\n" if layout.is_indented else ""


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _rooted(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that stands alone. If it has references, the root that they point into is part of it."""
    if not isinstance(schema, dict):
        return {}
    if "$ref" not in repr(schema):
        return schema
    return {**_moved(schema), "$defs": {"root": _moved(dict(root))}}


def _moved(schema: Any) -> Any:
    """Return the schema with references into the root under $defs."""
    if isinstance(schema, list):
        return [_moved(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value) for key, value in schema.items()}
    if isinstance(reference := moved.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/root{reference[1:]}"
    return moved
