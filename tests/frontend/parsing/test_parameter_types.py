"""The types of parameters by JSON schema, and texts as JSON values of these types."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.frontend.parsing.tool_formats.parameters import ANY, TEXT, as_json, parameter_types

DEFS: dict[str, Any] = {
    "name": {"type": "string"},
    "size": {"enum": [1, None]},
    "circle": {"$ref": "#/$defs/circle"},
    "tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/branches"}, {"type": "null"}]},
    "branches": {"oneOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/tree"}, {"type": "array"}]},
    "a/b~c": {"type": "object"},
    **{f"wide{depth}": {"anyOf": [{"$ref": f"#/$defs/wide{depth + 1}"}] * 9} for depth in range(40)},
    "wide40": {"type": "boolean"},
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string", "enum": ["1"]}, TEXT),
        ({"type": ["integer", "string"]}, {"number", "string"}),
        ({"type": ["file", 5, "array"]}, {"array"}),
        ({"enum": [1.5, "a", True]}, {"number", "string", "boolean"}),
        ({"const": {}}, {"object"}),
        ({"$ref": "#/$defs/name"}, TEXT),
        ({"$ref": "#/$defs/size"}, {"number", "null"}),
        ({"$ref": "#/$defs/a~1b~0c"}, {"object"}),
        ({"allOf": [{"$ref": "#/$defs/name"}]}, TEXT),
        ({"anyOf": [{"$ref": "#/$defs/name"}, {"type": "null"}]}, {"string", "null"}),
        ({"$ref": "#/$defs/circle"}, ANY),
        ({"$ref": "#/$defs/tree"}, {"null", "array"}),
        ({"$ref": "#/$defs/wide0"}, {"boolean"}),
        ({"$ref": "#/$defs/missing"}, ANY),
        ({"$ref": "https://example.com/schema"}, ANY),
        ({"description": "anything"}, ANY),
        (True, ANY),
    ],
)
def test_types_are_those_that_the_schema_allows(schema: Any, types: frozenset[str]) -> None:
    assert parameter_types({"properties": {"a": schema}, "$defs": DEFS}, "a") == types
    assert parameter_types({"properties": {"a": schema}}, "b") == ANY
    assert parameter_types({"properties": ["a"]}, "a") == ANY


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("5", {"number"}, "5"),
        (" 5\n", {"number"}, "5"),
        ("5", {"string"}, '"5"'),
        ("5", {"boolean", "null"}, '"5"'),
        ("05", {"number"}, '"05"'),
        ("NaN", {"number"}, '"NaN"'),
        ("None", {"string", "null"}, "null"),
        ("True", {"boolean"}, "true"),
        ("True", {"string"}, '"True"'),
        ('{"a": 1', {"object"}, '"{\\"a\\": 1"'),
        ('{"a": 1}', {"array"}, '"{\\"a\\": 1}"'),
        ('"a"', ANY, '"\\"a\\""'),
        ("[" * 5000, ANY, f'"{"[" * 5000}"'),
        ("", ANY, '""'),
    ],
)
def test_text_becomes_a_value_of_an_allowed_type(text: str, types: set[str], expected: str) -> None:
    assert as_json(text, frozenset(types)) == expected
