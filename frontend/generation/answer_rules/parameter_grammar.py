"""Rules for arguments that a format writes one by one, as tagged text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from penstock.frontend.generation.answer_rules.lark import MarkedText, json_value, literal
from penstock.frontend.parsing.tool_formats.parameter_types import TEXT, resolved, types_of
from penstock.shm.messages import MAX_GRAMMAR_CHARACTERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.frontend.parsing.tool_formats.base import ParameterLayout

_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
"""Keywords that hold for each parameter by itself. One rule per parameter cannot express any other."""
_KEY = re.compile(r"[^<>\n]+")
_ANY_KEY = "/[a-zA-Z0-9_.-]{1,64}/"
_MAX_TEXT_LENGTH = 10_000
"""Longer limits of a text's length are not expressed."""


def parameter_rules(
    name: str, schema: Mapping[str, Any], layout: ParameterLayout, text: MarkedText
) -> list[str] | None:
    """Return the rule `name` for the declared parameters in their order, and the rules below it.

    None if the format cannot express the schema: some keywords, names or texts have no form in it. A schema that
    declares no parameters allows any.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    others = schema.get("additionalProperties", True)
    if not schema.keys() <= _OBJECT_KEYWORDS or not set(required) <= properties.keys() or isinstance(others, dict):
        return None
    if not properties and others:
        any_text = _text_rule(f"{name}_text", {}, layout, text)
        return [f"{name}: ({text(layout.opening)} {_ANY_KEY} {text(layout.middle)} {name}_text)*", *any_text]
    names, rules, num_characters = [], [], 0
    for number, (key, declared) in enumerate(properties.items()):
        value = f"{name}_{number}"
        value_rules = _value_rules(value, declared, schema, layout, text)
        if value_rules is None or _KEY.fullmatch(key) is None:
            return None
        opening = text(f"{layout.opening}{key}{layout.middle}")
        names.append(f"({opening} {value})" + ("" if key in required else "?"))
        rules += value_rules
        num_characters += sum(map(len, value_rules))
        if num_characters > MAX_GRAMMAR_CHARACTERS:
            break  # too long whatever follows, and a reference repeats the whole schema
    return [f"{name}: {' '.join(names)}" if names else f'{name}: ""', *rules]


def _value_rules(
    name: str, declared: object, root: Mapping[str, Any], layout: ParameterLayout, text: MarkedText
) -> list[str] | None:
    """Return the rule `name` for a value and its closing mark; None if the format cannot express the schema."""
    types = types_of(declared, root)
    closing = text(f"{_line_break(layout)}{layout.closing}{layout.gap}")
    if "string" not in types:
        return [f"{name}: {name}_json {closing}", f"{name}_json: {json_value(_rooted(declared, root))}"]
    schema = resolved(declared, root)
    if not isinstance(schema, dict) or _allows_any(schema, root):
        return _text_rule(name, {}, layout, text)
    if types != TEXT:
        return None
    if schema.keys() <= {"type", "minLength", "maxLength"}:
        return _text_rule(name, schema, layout, text)
    values = schema["enum"] if "enum" in schema else [schema.get("const")]
    is_writable = all(isinstance(value, str) and layout.closing not in value for value in values)
    if is_writable and schema.keys() <= {"type", "enum", "const"}:
        return [f"{name}: ({' | '.join(map(literal, values))}) {closing}"]
    return None


def _allows_any(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether each value of the schema's types is valid."""
    if schema.keys() != {"anyOf"}:
        return schema.keys() <= {"type"}
    branches = (resolved(branch, root) for branch in schema["anyOf"])
    return all(isinstance(branch, dict) and branch.keys() <= {"type"} for branch in branches)


def _text_rule(name: str, limits: Mapping[str, int], layout: ParameterLayout, text: MarkedText) -> list[str]:
    """Return the rule `name` for a text without the closing mark, and that mark."""
    least, most = limits.get("minLength", 0), limits.get("maxLength", _MAX_TEXT_LENGTH)
    length = (
        "*" if most >= _MAX_TEXT_LENGTH and not least else f"{{{least},{'' if most >= _MAX_TEXT_LENGTH else most}}}"
    )
    line_break = r"\n" if layout.is_indented else ""
    terminal, gap = name.upper(), text(layout.gap) if layout.gap else ""
    content = f"{terminal}: /(.|\\n){length}{line_break}/ & ~/(.|\\n)*{_escaped(layout.closing)}(.|\\n)*/"
    if text.is_token(layout.closing):
        return [f"{name}: {terminal} {text(layout.closing)} {gap}", content]
    return [
        f"{name}: {name}_closed {gap}",
        f"{name}_closed[suffix={literal(layout.closing)}]: {terminal}",
        content,
    ]


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
