"""JSON in pieces, compared with Python's parser."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.frontend.parsing.json_text import read_json
from penstock.frontend.parsing.reader import Malformed, Reader
from tests.frontend.parsing.tool_texts import CUTS, JSON, cut

FRAGMENTS = [
    "{", "}", "[", "]", ",", ":", '"', '"a"', '"a":', "\\", "\\n", "\\q", "\\u00e9", "\\u00g", "\n", "\t", " ", "é",
    "🐈", "0", "1", "-", "-1", "01", "1.5", ".5", "1.", "e5", "1e+5", "true", "false", "null", "tru", "NaN", "Infinity",
]  # fmt: skip


def is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return text == text.strip()  # spaces around the value are not part of it


def read(pieces: list[str]) -> tuple[bool, str, str]:
    """Return whether it is exactly one value, what was emitted, and what is left."""
    reader, emitted, left = Reader(), list[str](), list[str]()
    reading = read_json(reader, emitted.append)
    is_value = True
    try:
        for piece in pieces:
            reader.push(piece)
            next(reading)
        reader.end()
        next(reading)
    except StopIteration:
        pass
    except Malformed:
        is_value = False
    reader.end()
    for _ in reader.rest(left.append):
        pass
    return is_value and not left, "".join(emitted), "".join(left)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join))
@example('{"a":01}')
def test_what_is_read_is_json_for_python(text: str) -> None:
    is_value, emitted, _ = read([text])
    assert is_value or not is_json(text)
    assert not is_value or is_json(emitted)
    assert not is_json(text) or emitted == text


@pytest.mark.parametrize(
    ("text", "repaired"),
    [
        ('"a\nb\tc\x01"', '"a\\nb\\tc\\u0001"'),
        (r'"C:\Projects\q \u00g0"', r'"C:\\Projects\\q \\u00g0"'),
        ('"don\\\'t"', '"don\'t"'),
        ('{"a": [1, 2 , ], }', '{"a": [1, 2  ] }'),
        ("[NaN, -Infinity]", "[null, null]"),
        ("{'it': True, 'b': None, 'c': 'say \"x\"'}", '{"it": true, "b": null, "c": "say \\"x\\""}'),
    ],
)
def test_faults_of_models_are_repaired(text: str, repaired: str) -> None:
    assert json.loads(repaired) is not False
    for size in (1, 2, len(text)):
        assert read([text[start : start + size] for start in range(0, len(text), size)]) == (True, repaired, "")


@settings(max_examples=50)
@given(JSON, st.sampled_from([None, 2]), CUTS)
def test_json_that_python_writes_is_read_in_any_split(value: object, indent: int | None, cuts: list[int]) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=bool(cuts))
    assert read(cut(text, cuts)) == (True, text, "")
