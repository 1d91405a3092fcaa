"""Grammars as clients send them, with random answers of ordinary words as models give them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from penstock.shm.messages import Grammar
from penstock.tools.bench.load_generator.workload import draw_words


@dataclass(frozen=True, slots=True)
class GrammarCase:
    """A grammar, and a source of texts that match it."""

    grammar: Grammar
    answer: Callable[[random.Random], str]


_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "editor", "reader"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["street", "number", "note"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "role", "tags", "address"],
    "additionalProperties": False,
}
_REGEX = r"[0-9]{4}-[0-9]{2}-[0-9]{2} (DEBUG|INFO|WARNING|ERROR) [a-z]+(\.[a-z]+)*: [^\n]{1,300}"
_LARK = """
start: "select " column (", " column)* " from " NAME (" where " condition)?
column: NAME | NAME "(" column ")"
condition: comparison ((" and " | " or ") comparison)*
comparison: column (" = " | " < " | " > ") value | "(" condition ")"
value: /[0-9]+(\\.[0-9]+)?/ | /'[^'\\n]*'/
NAME: /[a-z_]+/
"""


def _person(rng: random.Random) -> str:
    person = {
        "name": draw_words(rng, 2),
        "age": rng.randint(0, 150),
        "role": rng.choice(("admin", "editor", "reader")),
        "tags": [draw_words(rng, 1) for _ in range(4)],
        "address": {"street": draw_words(rng, 2), "number": rng.randint(1, 999), "note": draw_words(rng, 20)},
    }
    return json.dumps(person)


def _log_line(rng: random.Random) -> str:
    level = rng.choice(("DEBUG", "INFO", "WARNING", "ERROR"))
    return f"2026-0{rng.randint(1, 9)}-{rng.randint(10, 28)} {level} {draw_words(rng, 3, '.')}: {draw_words(rng, 30)}"


def _query(rng: random.Random) -> str:
    columns = ", ".join(f"{draw_words(rng, 1)}({draw_words(rng, 1)})" for _ in range(4))
    comparisons = [f"{draw_words(rng, 1)} = '{draw_words(rng, 3)}'" for _ in range(4)]
    table = draw_words(rng, 2, "_")
    return f"select {columns} from {table} where ({' or '.join(comparisons)}) and age > 12.5"  # noqa: S608 - only text


CASES = (
    GrammarCase(Grammar("json_schema", json.dumps(_SCHEMA)), _person),
    GrammarCase(Grammar("regex", _REGEX), _log_line),
    GrammarCase(Grammar("lark", _LARK), _query),
)
