"""JSON in pieces, compared with Python's parser."""

from __future__ import annotations

import json

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
@example('"\\q"')
@example('{"a":01}')
@example('"\\u00g0"')
@example("[1,]")
def test_json_that_python_refuses_is_refused(text: str) -> None:
    is_value, emitted, left = read([text])
    assert is_value == is_json(text)
    assert emitted + left == text


@settings(max_examples=50)
@given(JSON, st.sampled_from([None, 2]), CUTS)
def test_json_that_python_writes_is_read_in_any_split(value: object, indent: int | None, cuts: list[int]) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=bool(cuts))
    assert read(cut(text, cuts)) == (True, text, "")
