"""What a request's tools make of its answer: which calls are read, and the grammar of those that must be well-formed.

The grammar is in llguidance's Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.frontend.parsing.tool_formats.hermes import Hermes
from penstock.frontend.schemas.chat import NamedTool
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid
from penstock.shm.messages import MAX_GRAMMAR_CHARACTERS, Grammar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.frontend.parsing.model_syntax import ModelSyntax
    from penstock.frontend.parsing.reasoning import ReasoningFormat
    from penstock.frontend.parsing.tool_formats.base import ToolFormat
    from penstock.frontend.schemas.chat import ChatBody, FunctionDefinition

GAP = "GAP?"
"""In Lark: the empty lines that models write behind their reasoning."""
_MAX_FORCED_CALLS = 16
_COMMON_RULES = ("TEXT: /(.|\\n)*/", "GAP: /\\n{1,2}/")
_WHITESPACE = r" ?|\n {0,24}"
"""Between the parts of a JSON text: as models write it, on one line or indented, and never without end."""
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_UNTOLD = frozenset({"title", "description", "examples", "default", "$comment", "x-guidance"})
"""Members of a schema that say nothing of what is valid."""
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum"})


def tool_format(body: ChatBody, syntax: ModelSyntax) -> ToolFormat | None:
    """How the answer's calls are written; None where it can have none. Raises ApiError where that cannot be known."""
    if not body.offered_tools:
        return None
    if not syntax.offers_tools:
        raise ApiError(ErrorKind.UNSUPPORTED_FIELD, "tools: this server offers none", param="tools")
    if syntax.tools is not None:
        return syntax.tools
    if body.must_call:
        return Hermes()  # the grammar leaves no other way
    reason = "this model's chat template has no tools, or a form of calls that is not known here"
    message = f'tools: {reason}; tool_choice "required", a named one, and the option --tool-parser do without it'
    raise ApiError(ErrorKind.UNSUPPORTED_FIELD, message, param="tools")


def call_grammar(
    body: ChatBody,
    form: ToolFormat,
    answer: Grammar | None,
    added_tokens: Mapping[str, int],
    before: str,
) -> Grammar | None:
    """The grammar of an answer that may call, or must; None where nothing is to be enforced, that of `answer` alone
    where calls cannot be told from it.

    answer is what the request wants of an answer without calls; before is Lark for what comes first.
    Raises ApiError where a call must be made and an answer of another form as well, or where the grammar is too long.
    """
    if body.must_call and answer is not None:
        invalid("tool_choice", "a call that must be made leaves no room for response_format and the like")
    functions = _callable_functions(body)
    trigger_id = None if form.trigger is None else added_tokens.get(form.trigger)
    more: tuple[str, ...] = ()
    if body.must_call:
        start = "calls"
    elif answer is not None:
        if answer.kind != "json_schema" or form.trigger is None:
            return after_reasoning(answer, before)
        start, more = "calls | answer", (_answer_rule(answer),)
    elif trigger_id is not None and any(function.strict for function in functions):
        start = "TEXT (calls TEXT)*"
    else:
        return None
    enforces_all = body.must_call or answer is not None
    schemas = [_schema(function) if enforces_all or function.strict else _ANY_OBJECT for function in functions]
    rules = _call_rules(functions, schemas, form, added_tokens, 1 if body.calls_once else _MAX_FORCED_CALLS)
    text = "\n".join((f"start: {before} ({start})", *more, *rules, *_COMMON_RULES))
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        invalid(
            "tools", f"their schemas make a grammar of {len(text)} characters; {MAX_GRAMMAR_CHARACTERS} are allowed"
        )
    return Grammar("lark", text)


def after_reasoning(answer: Grammar, before: str) -> Grammar:
    """The same with Lark for what comes first, where that can be put before it."""
    if answer.kind != "json_schema" or not before:
        return answer
    text = "\n".join((f"start: {before} answer", _answer_rule(answer), *_COMMON_RULES))
    return Grammar("lark", text) if len(text) <= MAX_GRAMMAR_CHARACTERS else answer


def reasoning_rule(form: ReasoningFormat, added_tokens: Mapping[str, int]) -> str:
    """Reasoning that a model may begin with, in Lark; nothing where its marks are no tokens."""
    if any(marker not in added_tokens for marker in form.markers):
        return ""
    return f"(<[{added_tokens[form.opening]}]> TEXT <[{added_tokens[form.closing]}]> GAP?)?"


def _answer_rule(answer: Grammar) -> str:
    return f"answer: %json {_spaced(msgspec.json.decode(answer.text, type=dict[str, Any]))}"


def _spaced(schema: dict[str, Any]) -> str:
    return msgspec.json.encode({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}).decode()


def _callable_functions(body: ChatBody) -> list[FunctionDefinition]:
    functions = [tool.function for tool in body.offered_tools]
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return [function for function in functions if function.name == choice.function.name]
    return functions


def _call_rules(
    functions: list[FunctionDefinition],
    schemas: list[dict[str, Any]],
    form: ToolFormat,
    added_tokens: Mapping[str, int],
    max_calls: int,
) -> list[str]:
    """The rule `calls` and those below it. Each schema is a grammar of its own, so that its references hold."""

    def lark(text: str) -> str:
        """Markers that are tokens must be those tokens: their characters, one by one, are another text to a model."""
        pattern = "|".join(re.escape(marker) for marker in form.markers if marker in added_tokens)
        parts = re.split(f"({pattern})", text) if pattern else [text]
        return " ".join(_literal(part, added_tokens if place % 2 else {}) for place, part in enumerate(parts) if part)

    repeated = f"({lark(form.separator)} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    rules = [
        f"calls: {lark(form.opening)} call {repeated} {lark(form.closing)}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(functions))),
    ]
    for number, (function, schema) in enumerate(zip(functions, schemas, strict=True)):
        before, behind = form.around(function.name)
        rules += [
            f"call_{number}: {lark(before)} arguments_{number} {lark(behind)}",
            f"arguments_{number}: %json {_spaced(schema)}",
        ]
    return rules


def _literal(text: str, added_tokens: Mapping[str, int]) -> str:
    return f"<[{added_tokens[text]}]>" if text in added_tokens else msgspec.json.encode(text).decode()


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    return {**_ANY_OBJECT, **_pruned(function.parameters or {})}


def _pruned(schema: Any) -> Any:
    """Without what is only said to the model, which is most of many schemas."""
    if isinstance(schema, list):
        return [_pruned(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    pruned: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NAMED_SCHEMAS and isinstance(value, dict):
            pruned[name] = {key: _pruned(inner) for key, inner in value.items()}
        elif name not in _UNTOLD:
            pruned[name] = value if name in _VALUES else _pruned(value)
    return pruned
