"""The operations of `bounded_sandbox`: filters, methods and operators, each counted.

An operation whose result may be much larger than its operands is counted before it runs.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from jinja2.filters import do_format, do_indent, do_int, make_attrgetter
from jinja2.runtime import Context
from jinja2.utils import pass_context

from penstock.frontend.text.render_budget import (
    BYTES_PER_UNIT,
    ELEMENT_UNITS,
    ESCAPED_UNITS,
    MAX_ARGUMENT,
    MAX_BITS,
    Refused,
    RenderBudget,
)

# Filters that the compiled template calls. No template can: a name has no space.
SPEND, MADE, SLICED, ADDED, TEXT, JOINED = " spend", " made", " sliced", " added", " text", " joined"
METERED = " metered"

_REMOVED_FILTERS = (
    *("filesizeformat", "pprint", "random", "striptags", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr"),
)
_FREE_FILTERS = ("attr", "count", "d", "default", "first", "float", "items", "last", "length", "safe")
_LAZY_FILTERS = ("map", "reject", "rejectattr", "select", "selectattr")
_LIST_FILTERS = ("batch", "dictsort", "groupby", "list", "max", "min", "reverse", "slice", "sort", "unique")
_WRITTEN_UNITS = {"trim": 1, "truncate": 1, "string": 1, "abs": 1, "round": 1, "center": 1}

_CONTAINER_METHODS = ("copy", "count", "get", "index", "items", "keys", "values")
LIST_CHANGES = ("append", "pop")
_NO_TEXT_METHODS = ("encode", "format_map", "maketrans", "translate")
_PIECE_UNITS = 2
"""For each character of a text that is split at any space or line."""
_MAX_SEPARATOR = 16
_LONG = 4096
_MAX_INDENT = 64
_PARTS_AT_ONCE = 256
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0 +-]*(?:\d{5}|\*|\d*\.(?:\d{5}|\*))")
_SHORT_NUMBER = re.compile(r"\d{1,4}")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\d{5}|\{)")
"""Of a format: a width of five digits, or one that is an argument."""


class BoundedContext(Context):
    """Carries the budget of its rendering."""

    budget: RenderBudget

    def derived(self, locals: dict[str, Any] | None = None) -> BoundedContext:  # noqa: A002 - jinja2's name
        context = cast("BoundedContext", super().derived(locals))
        context.budget = self.budget
        return context


def budget_of(context: Context) -> RenderBudget:
    return cast("BoundedContext", context).budget


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = getattr(function, "jinja_pass_arg", None)
    kind = "" if passed is None else passed.name
    written_units = _WRITTEN_UNITS.get(name, ESCAPED_UNITS)

    @pass_context
    def bounded(context: BoundedContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        if args or kwargs:
            budget.check_arguments((*args, *kwargs.values()))
        if name in _LIST_FILTERS:
            value = budget.metered(value)
        elif isinstance(value, str):
            budget.spend(budget.size(value) * written_units)
        else:
            budget.spend_on_writing(value)
        if not kind:
            return budget.made(function(value, *args, **kwargs))
        first = context.eval_ctx if kind == "eval_context" else context.environment
        return budget.made(function(first, value, *args, **kwargs))

    return bounded


def _written(budget: RenderBudget, value: object) -> str:
    if not isinstance(value, str):
        budget.spend_on_writing(value)
    return str(value)


def counted_result(budget: RenderBudget, result: Any) -> Any:
    """Count what an operator made. Raises OverBudget, Refused."""
    if isinstance(result, int) and result.bit_length() > MAX_BITS:
        raise Refused(f"a number has more than the limit of {MAX_BITS} bits")
    return budget.made(result)


@pass_context
def _spend(context: BoundedContext, units: int) -> None:
    context.budget.spend(units)


@pass_context
def _made(context: BoundedContext, value: Any) -> Any:
    return context.budget.made(value)


@pass_context
def _metered(context: BoundedContext, values: Any) -> Any:
    return context.budget.metered(values)


@pass_context
def _sliced(context: BoundedContext, value: Any) -> Any:
    if isinstance(value, list | tuple):  # no larger as a tree than what it is a slice of
        context.budget.spend(ELEMENT_UNITS + len(value))
        return value
    return context.budget.made(value)


@pass_context
def _added(context: BoundedContext, values: list[Any]) -> Any:
    budget = context.budget
    length = 0
    for value in values:
        if type(value) is not str:
            return functools.reduce(functools.partial(_add, budget), values)
        length += len(value)
    budget.left -= 1 + length // BYTES_PER_UNIT
    if budget.left < 0 or length > _LONG:
        budget.look()
        return budget.made("".join(values))
    return "".join(values)


def _add(budget: RenderBudget, left: Any, right: Any) -> Any:
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        budget.spend(units_of(left) + units_of(right))
    return counted_result(budget, left + right)


@pass_context
def _text(context: BoundedContext, value: Any) -> Any:
    budget = context.budget
    if type(value) is not str:
        return budget.made(_written(budget, value))
    budget.left -= 1 + len(value) // BYTES_PER_UNIT
    if budget.left < 0:
        budget.look()
    return value


@pass_context
def _joined(context: BoundedContext, values: Iterable[object]) -> str:
    return join(context, values)


@pass_context
def join(context: BoundedContext, values: Any, d: object = "", attribute: str | int | None = None) -> str:
    budget = context.budget
    if attribute is not None:
        values = map(make_attrgetter(context.environment, attribute), values)
    texts = [_written(budget, value) for value in budget.metered(values)]
    separator = _written(budget, d)
    budget.spend((sum(map(len, texts)) + len(separator) * len(texts)) // BYTES_PER_UNIT)
    return str(budget.made(separator.join(texts)))


@pass_context
def _replace(context: BoundedContext, value: object, old: object, new: object, count: int | None = None) -> Any:
    budget = context.budget
    text, removed, added = (_written(budget, part) for part in (value, old, new))
    budget.spend(text.count(removed) * len(added) // BYTES_PER_UNIT)
    return budget.made(text.replace(removed, added, -1 if count is None else count))


@pass_context
def _indent(context: BoundedContext, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    budget = context.budget
    text = _written(budget, value)
    budget.check_arguments((width,))
    budget.spend(_PIECE_UNITS * len(text))
    budget.spend(len(text.splitlines()) * (width if isinstance(width, int) else len(width)) // BYTES_PER_UNIT)
    return budget.made(do_indent(text, width, first, blank))


@pass_context
def _format(context: BoundedContext, value: object, *args: Any, **kwargs: Any) -> Any:
    text = _written(context.budget, value)
    check_format(context.budget, text, "%", kwargs or args)
    return context.budget.made(do_format(text, *args, **kwargs))


@pass_context
def _int(context: BoundedContext, value: Any, default: int = 0, base: int = 10) -> Any:
    return counted_result(context.budget, do_int(value, default, base))


@pass_context
def _sum(context: BoundedContext, values: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    if attribute is not None:
        values = map(make_attrgetter(context.environment, attribute), values)
    if not isinstance(start, int | float):
        raise Refused("the filter sum adds numbers only")
    return sum(context.budget.metered(values), start)


@pass_context
def _to_json(
    context: BoundedContext,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> Any:
    budget = context.budget
    if any(len(separator) > _MAX_SEPARATOR for separator in separators or ()):
        raise Refused(f"a separator of tojson is longer than {_MAX_SEPARATOR} characters")
    budget.spend_on_writing(value)
    options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "separators": separators, "sort_keys": sort_keys}
    if indent is None:
        return budget.made(json.dumps(value, **options))
    if (indent if isinstance(indent, int) else len(indent)) > _MAX_INDENT:
        raise Refused(f"tojson indents by more than the limit of {_MAX_INDENT}")
    encoded, parts = json.JSONEncoder(indent=indent, **options).iterencode(value), []
    while some := list(itertools.islice(encoded, _PARTS_AT_ONCE)):
        budget.spend(sum(map(len, some)) // BYTES_PER_UNIT)
        parts += some
    return "".join(parts)


def check_format(budget: RenderBudget, text: str, mark: str, values: object) -> None:
    """Count what a format makes. Raises OverBudget, Refused."""
    if _WIDE_PERCENT.search(text) if mark == "%" else _WIDE_BRACES.search(text.replace("{{", "")):
        raise Refused(f"a format has a width from an argument, or above the limit of {MAX_ARGUMENT - 1}")
    widest = max(map(int, _SHORT_NUMBER.findall(text)), default=0)
    budget.spend(text.count(mark) * (ESCAPED_UNITS * budget.size(values) + widest // BYTES_PER_UNIT))


def check_text_method(
    budget: RenderBudget, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Count what a method of a text makes, if it may be much more than the text. Raises OverBudget, Refused."""
    values = (*args, *kwargs.values())
    if name in _NO_TEXT_METHODS:
        raise Refused(f"str.{name} is not for templates")
    if name == "format":
        check_format(budget, text, "{", values)
        return
    budget.check_arguments(values)
    first = values[0] if values and isinstance(values[0], str) else ""
    if name == "replace" and len(args) > 1 and isinstance(args[1], str):
        budget.spend(text.count(first) * len(args[1]) // BYTES_PER_UNIT)
    elif name in ("split", "rsplit"):
        budget.spend(ELEMENT_UNITS * text.count(first) if first else _PIECE_UNITS * len(text))
    elif name == "splitlines":
        budget.spend(_PIECE_UNITS * len(text))
    elif name == "expandtabs":
        budget.spend(text.count("\t") * max([8, *(value for value in values if isinstance(value, int))]))


def is_known_method(owner: object, name: str) -> bool:
    is_container = isinstance(owner, list | tuple | dict) and name in _CONTAINER_METHODS
    return is_container or type(owner).__module__.startswith("jinja2.")


def units_of(value: str | list[Any] | tuple[Any, ...]) -> int:
    return 1 + len(value) // BYTES_PER_UNIT if isinstance(value, str) else len(value)


def bounded_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return jinja2's filters, each with its bounds, and those of the compiled template."""
    kept = {name: function for name, function in filters.items() if name not in _REMOVED_FILTERS}
    unbounded = (*_FREE_FILTERS, *_LAZY_FILTERS)
    return {
        **{name: function if name in unbounded else _bounded(name, function) for name, function in kept.items()},
        "replace": _replace,
        "join": join,
        "indent": _indent,
        "format": _format,
        "int": _int,
        "sum": _sum,
        "tojson": _to_json,
        SPEND: _spend,
        MADE: _made,
        METERED: _metered,
        SLICED: _sliced,
        ADDED: _added,
        TEXT: _text,
        JOINED: _joined,
    }
