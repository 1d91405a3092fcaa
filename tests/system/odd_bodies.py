"""Requests that are wrong in odd ways, made from the server's own OpenAPI document."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

_MESSAGES = [{"role": "user", "content": "x"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/responses/compact": {"model": "penstock-demo", "input": "x", "max_output_tokens": 1},
    "/v1/quote": {"messages": _MESSAGES, "max_tokens": 1},
    "/invocations": {"messages": _MESSAGES, "max_tokens": 1},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": _MESSAGES},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1, 2]},
    "/apply-template": {"messages": _MESSAGES},
}
"""A small valid body of every endpoint that reads one."""

_DEEP = json.loads("[" * 200 + "]" * 200)
_ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\u0000", "\ud800", "😀" * 5000, "x" * 100_000, "nan", "-1"),
    *(0, 1, -1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *(
        [],
        [[]],
        {},
        [None],
        [{}],
        [1],
        ["x"],
        {"": None},
        {"type": "x"},
        {"type": None},
        {"type": "object"},
        [0] * 5000,
    ),
    *({"a": "x"}, _DEEP, [{"type": "text", "text": None}], [{"role": "x", "content": []}], {"$ref": "#"}),
)
_ODD_BYTES = (b"", b"\xff", b"null", b"[]", b'"x"', b"{", b'{"a":1,}', b"[" * 100_000, b'{"a":\xff}', b"\xef\xbb\xbf{}")


def fields_of(document: dict[str, Any], path: str) -> list[str]:
    """Return the names of the fields of an endpoint's body, which may have one of several forms."""
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields: dict[str, None] = {}
    for schema in body.get("anyOf", [body]):
        while "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        fields |= dict.fromkeys(schema["properties"])
    return list(fields)


def sample(document: dict[str, Any], schema: dict[str, Any], random: Random, depth: int = 0) -> Any:
    """Return a value that the schema may allow: now and then an odd one, and without regard to most limits."""
    if depth > 6 or (depth and random.random() < 0.03):
        return random.choice(_ODD_VALUES)
    if "$ref" in schema:
        return sample(document, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], random, depth)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return sample(document, random.choice(schema[key]), random, depth)
    if "enum" in schema or "const" in schema:
        return random.choice(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "object":
            properties: dict[str, Any] = schema.get("properties", {})
            required = schema.get("required", ())
            share = 0.1 if depth == 0 else 0.5
            chosen = [name for name in properties if name in required or random.random() < share]
            return {name: sample(document, properties[name], random, depth + 1) for name in chosen}
        case "array":
            if "prefixItems" in schema:
                return [sample(document, each, random, depth + 1) for each in schema["prefixItems"]]
            count = random.choice((0, 1, 1, 2, 3))
            return [sample(document, schema.get("items", {}), random, depth + 1) for _ in range(count)]
        case "string":
            return random.choice(("", "x", "auto", "none", "{}", '{"a": 1}', "root ::= 'a'", "[a-z]+", "<|im_end|>"))
        case "integer":
            return random.choice((schema.get("minimum", 0), 1, 2, 7, schema.get("maximum", 300)))
        case "number":
            return random.choice((schema.get("minimum", 0.0), 0.5, 1, schema.get("maximum", 2.0)))
        case "boolean":
            return random.random() < 0.5
        case "null":
            return None
        case _:
            return random.choice(_ODD_VALUES)


def odd_bodies(document: dict[str, Any], random: Random, num_samples: int) -> Iterator[tuple[str, bytes]]:
    """Yield paths and bodies: some bodies are valid, most are not. num_samples is per kind of oddness and path."""
    for path, valid in VALID.items():
        for data in _ODD_BYTES:
            yield path, data
        for missing in valid.keys() - {"max_tokens", "max_output_tokens"}:  # which bound the answer
            yield path, _encoded({name: value for name, value in valid.items() if name != missing})
        odd_fields = [(field, value) for field in fields_of(document, path) for value in _ODD_VALUES]
        for field, value in random.sample(odd_fields, min(num_samples, len(odd_fields))):
            yield path, _encoded(valid | {field: value})
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for _ in range(num_samples):
            yield path, _encoded(valid | sample(document, body, random) | _bound(valid))
        for _ in range(num_samples):
            yield path, _encoded(_changed_within(valid, random))
            data = _encoded(valid)
            place = random.randrange(max(1, len(data) - 30))  # before what bounds the answer
            yield path, data[:place] + random.randbytes(random.randrange(3)) + data[place + random.randrange(3) :]


def _changed_within(valid: dict[str, Any], random: Random) -> dict[str, Any]:
    """Return the body with an odd value somewhere inside."""
    changed = copy.deepcopy(valid)
    place: Any = changed
    while True:
        key = random.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if key in ("max_tokens", "max_output_tokens"):
            continue
        if not isinstance(place[key], dict | list) or not place[key] or random.random() < 0.3:
            place[key] = random.choice(_ODD_VALUES)
            return changed
        place = place[key]


def _bound(valid: dict[str, Any]) -> dict[str, Any]:
    return {name: valid[name] for name in valid.keys() & {"max_tokens", "max_output_tokens"}}


def _encoded(body: object) -> bytes:
    return json.dumps(body).encode()
