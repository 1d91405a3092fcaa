"""Rules for the parts of a JSON schema with integers that a double cannot hold.

llguidance reads numbers as doubles: it would write another integer, without a word. So a constant becomes its text, a
bound an expression over digits, and what contains them a rule of Lark. All other parts stay JSON schemas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from penstock.backend.structured_output.grammar_costs import BadGrammar, one_line

_LAST_EXACT = (1 << 53) - 1
_INT64 = range(-(1 << 63) + 1, 1 << 63)
"""llguidance takes greater bounds for the greatest of these, and cannot take -2^63."""
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "format", "$schema", "x-guidance"})
"""With the definitions: keywords that limit no value here."""
_DEFINITIONS = ("$defs", "definitions")
_BOUNDS = {"minimum": 0, "exclusiveMinimum": 1, "maximum": 0, "exclusiveMaximum": -1}
"""What makes each an inclusive bound."""
_LIMITS = frozenset({"type", "const", "enum", *_BOUNDS})
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
_ARRAY = frozenset({"type", "items", "minItems", "maxItems"})
_REFERENCE = re.compile(r'"\$ref":"#/([^/"]+)/([^"]+)"')
_GAP = r"/( |\n {0,24})?/"
_COMMA = f'{_GAP} "," {_GAP}'
_KEY = r'/"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/'


def _is_inexact(schema: Any) -> bool:
    """Whether llguidance would take an integer in the schema for another one. Definitions do not count."""
    if isinstance(schema, list):
        return any(map(_is_inexact, schema))
    if not isinstance(schema, dict):
        return False
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties") and isinstance(value, dict):
            found = any(map(_is_inexact, value.values()))
        elif keyword in _BOUNDS:
            found = _is_inexact_bound(keyword, value)
        elif keyword in ("const", "enum"):
            found = any(map(_is_inexact_value, _integers(value)))
        else:
            found = keyword not in ("default", "examples", *_DEFINITIONS) and _is_inexact(value)
        if found:
            return True
    return False


def _is_inexact_bound(keyword: str, value: Any) -> bool:
    if not isinstance(value, int) or abs(value) <= _LAST_EXACT:
        return False
    nearest = max(_INT64.start, min(_INT64.stop - 1, int(float(value)))) if abs(value) < 1 << 1000 else None
    return _BOUNDS[keyword] != 0 or nearest != value


def _is_inexact_value(value: int) -> bool:
    return abs(value) > _LAST_EXACT and (value not in _INT64 or int(float(value)) != value)


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _integers(inner)


class ExactIntegers:
    """Makes the rules for one schema. They are named prefix_0, prefix_1, …"""

    def __init__(self, root: dict[str, Any], prefix: str) -> None:
        self.rules: list[str] = []
        self._prefix = prefix
        self._num_names = 0
        self._definitions = {name: root[name] for name in _DEFINITIONS if name in root}
        self._options = {"x-guidance": root["x-guidance"]} if "x-guidance" in root else {}
        self._references: dict[str, str] = {}
        """The rule of each reference to a definition."""

    def value(self, schema: Any, path: str = "") -> str:
        """Return Lark for a value that the schema allows. Raises BadGrammar with the path of a keyword that has no
        form beside such integers."""
        if not isinstance(schema, dict) or self._is_exact(schema):
            return self._json(schema, path)
        if "$ref" in schema:
            self._only(schema, frozenset({"$ref"}), path)
            return self._reference(schema["$ref"], path)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(keyword), list) and (keyword == "anyOf" or _are_constants(options)):
                self._only(schema, frozenset({keyword}), path)
                values = (self.value(option, f"{path}{keyword}[{at}].") for at, option in enumerate(options))
                return f"({' | '.join(values)})"
        if schema.keys() & (_LIMITS - {"type"}):
            return self._scalar(schema, path)
        if "properties" in schema or "additionalProperties" in schema:
            return self._object(schema, path)
        if "items" in schema:
            return self._array(schema, path)
        self._only(schema, frozenset({"type"}), path)
        return self._json(schema, path)

    def _is_exact(self, schema: dict[str, Any]) -> bool:
        """Whether llguidance takes the integers in the schema and in all that it refers to as they are."""
        seen: set[tuple[str, str]] = set()
        waiting: list[Any] = [schema]
        while waiting:
            if _is_inexact(inner := waiting.pop()):
                return False
            for section, name in _REFERENCE.findall(_text(inner)):
                if (section, name) not in seen:
                    seen.add((section, name))
                    waiting.append(self._definition(section, name))
        return True

    def _definition(self, section: str, name: str) -> Any:
        definitions = self._definitions.get(section)
        return definitions.get(name) if isinstance(definitions, dict) else None

    def _json(self, schema: Any, path: str) -> str:
        if not isinstance(schema, dict | bool):
            raise BadGrammar(one_line(f"{path} a schema must be an object or a boolean"))
        whole = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
        definitions = self._definitions if '"$ref"' in _text(whole) else {}
        return f"%json {_text({**definitions, **whole, **self._options})}"

    def _only(self, schema: dict[str, Any], keywords: frozenset[str], path: str) -> None:
        for keyword in schema.keys() - keywords - _ANNOTATIONS - {*_DEFINITIONS}:
            raise BadGrammar(one_line(f"{path}{keyword}: has no form beside integers beyond {_LAST_EXACT}"))

    def _rule(self, body: str, name: str = "") -> str:
        name = name or self._name()
        self.rules.append(f"{name}: {body}")
        return name

    def _name(self) -> str:
        self._num_names += 1
        return f"{self._prefix}_{self._num_names}"

    def _reference(self, reference: Any, path: str) -> str:
        section, _, name = str(reference).removeprefix("#/").partition("/")
        definition = self._definition(section, name)
        if definition is None:
            raise BadGrammar(one_line(f"{path}$ref: must name one of the definitions, got {reference}"))
        if reference not in self._references:
            self._references[reference] = rule = self._name()
            self._rule(self.value(definition, f"{section}.{name}."), rule)
        return self._references[reference]

    def _scalar(self, schema: dict[str, Any], path: str) -> str:
        self._only(schema, _LIMITS, path)
        types = schema.get("type", ["integer"] if "const" in schema or "enum" in schema else None)
        types = [types] if isinstance(types, str) else types
        takes_integers = isinstance(types, list) and ("integer" in types or "number" in types)
        least, most = _bounds(schema, path)
        values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
        if not isinstance(values, list):
            if types != ["integer"] and types != ["integer", "null"] and types != ["null", "integer"]:
                raise BadGrammar(one_line(f"{path}type: must be integer beside bounds beyond {_LAST_EXACT}"))
            rule = self._rule(f"/{integer_range(least, most)}/")
            return f'({rule} | "null")' if "null" in types else rule
        inexact = [value for value in values if any(map(_is_inexact_value, _integers(value)))]
        fit = [
            value
            for value in inexact
            if not isinstance(value, int) or (takes_integers and _is_within(value, least, most))
        ]
        others = [value for value in values if value not in inexact]
        texts = [_text(_text(value)) for value in fit]
        if others:
            texts.append(self._json({**schema, "enum": others} if "enum" in schema else schema, path))
        if not texts:
            raise BadGrammar(one_line(f"{path}enum: allows no value"))
        return self._rule(" | ".join(texts))

    def _object(self, schema: dict[str, Any], path: str) -> str:
        self._only(schema, _OBJECT, path)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        is_usable = isinstance(properties, dict) and isinstance(required, list)
        if not is_usable or not all(isinstance(name, str) and name in properties for name in required):
            raise BadGrammar(one_line(f"{path}properties: must be an object that has all required ones"))
        others = schema.get("additionalProperties", True)
        rest, rest_after = ('""', '""')
        if others is not False:
            taken = " | ".join(_text(_text(name)) for name in properties)
            key = self._name().upper()
            self.rules.append(f"{key}: {_KEY}" + (f" & ~({taken})" if taken else ""))
            member = self._member(key, others, f"{path}additionalProperties.")
            more = self._rule(f"({_COMMA} {member})*")
            rest, rest_after = self._rule(f"({member} {more})?"), more
        for name, inner in reversed(properties.items()):
            member = self._member(_text(_text(name)), inner, f"{path}properties.{name}.")
            if name in required:
                rest, rest_after = (
                    self._rule(f"{member} {rest_after}"),
                    self._rule(f"{_COMMA} {member} {rest_after}"),
                )
            else:
                rest, rest_after = (
                    self._rule(f"{member} {rest_after} | {rest}"),
                    self._rule(f"({_COMMA} {member})? {rest_after}"),
                )
        return self._rule(f'"{{" {_GAP} {rest} {_GAP} "}}"')

    def _member(self, key: str, schema: Any, path: str) -> str:
        return self._rule(f'{key} {_GAP} ":" {_GAP} {self.value(schema, path)}')

    def _array(self, schema: dict[str, Any], path: str) -> str:
        self._only(schema, _ARRAY, path)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or not isinstance(most, int | None):
            raise BadGrammar(one_line(f"{path}minItems, maxItems: must be integers"))
        item = self._rule(self.value(schema["items"], f"{path}items."))
        if most == 0:
            return self._rule(f'"[" {_GAP} "]"')
        more = f"({_COMMA} {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        optional = "" if least else "?"
        return self._rule(f'"[" {_GAP} ({item} {more}){optional} {_GAP} "]"')


def _are_constants(options: list[Any]) -> bool:
    """Whether no two of them allow the same value, so that oneOf is anyOf."""
    return all(isinstance(option, dict) and "const" in option for option in options)


def _text(value: Any) -> str:
    """JSON; of a text also a string of Lark."""
    return msgspec.json.encode(value).decode()


def _bounds(schema: dict[str, Any], path: str) -> tuple[int | None, int | None]:
    """Return the least and the greatest integer."""
    for keyword in _BOUNDS:
        if not isinstance(schema.get(keyword, 0), int):
            raise BadGrammar(one_line(f"{path}{keyword}: must be an integer beside integers beyond {_LAST_EXACT}"))
    lowest = [schema[keyword] + _BOUNDS[keyword] for keyword in ("minimum", "exclusiveMinimum") if keyword in schema]
    highest = [schema[keyword] + _BOUNDS[keyword] for keyword in ("maximum", "exclusiveMaximum") if keyword in schema]
    least, most = max(lowest, default=None), min(highest, default=None)
    if least is not None and most is not None and least > most:
        raise BadGrammar(one_line(f"{path}minimum: no integer is within the bounds"))
    return least, most


def _is_within(value: int, least: int | None, most: int | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def integer_range(least: int | None, most: int | None) -> str:
    """Return a regular expression for the integers within the bounds."""
    parts: list[str] = []
    if least is None or least < 0:
        low = max(1, -most) if most is not None else 1
        parts.append(f"-({_natural_range(low, None if least is None else -least)})")
    if most is None or most >= 0:
        parts.append(_natural_range(max(0, least or 0), most))
    return "|".join(parts)


def _natural_range(low: int, high: int | None) -> str:
    """Return a regular expression for low to high, both natural; high None: without end."""
    if high is None:
        digits = len(str(low))
        return f"{_natural_range(low, 10**digits - 1)}|[1-9][0-9]{{{digits},}}"
    ends = [low, *(10**power for power in range(len(str(low)), len(str(high)))), high + 1]
    return "|".join(_same_length(str(start), str(stop - 1)) for start, stop in pairwise(ends))


def _same_length(low: str, high: str) -> str:
    """Return a regular expression for the numbers from low to high, which have equally many digits."""
    if low == high:
        return low
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{len(low)}}}"
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if not rest:
        return f"[{first}-{last}]"
    if first == last:
        return f"{first}({_same_length(low[1:], high[1:])})"
    parts = []
    if set(low[1:]) != {"0"}:
        parts.append(f"{first}({_same_length(low[1:], '9' * rest)})")
        first += 1
    ends_full = set(high[1:]) == {"9"}
    until = last if ends_full else last - 1
    if first <= until:
        parts.append(f"[{first}-{until}][0-9]{{{rest}}}")
    if not ends_full:
        parts.append(f"{last}({_same_length('0' * rest, high[1:])})")
    return "|".join(parts)
