"""Tools: how the answer's calls are parsed, and a grammar for the backend if calls must be well-formed.

The grammar is in llguidance's Lark (`lark`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.frontend.generation.answer_rules.lark import MarkedText, json_value, lenient, literal
from penstock.frontend.generation.answer_rules.parameter_grammar import ParameterGrammar
from penstock.frontend.parsing.reasoning import ReasoningFormat
from penstock.frontend.parsing.syntax.model_syntax import ModelSyntax
from penstock.frontend.parsing.tool_formats.base import ToolFormat
from penstock.frontend.schemas.chat import ChatBody, FunctionDefinition, NamedTool
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid
from penstock.shm.messages import MAX_GRAMMAR_CHARACTERS, Grammar

_GAP = "GAP?"
"""Empty lines that most models write after their reasoning."""
_COMMON_RULES = ("TEXT: /(.|\\n)*/", "GAP: /\\n{1,2}/")
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_ANNOTATIONS = frozenset({"title", "description", "examples", "default", "$comment", "x-guidance"})
"""Members of a schema that do not affect what is valid."""
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum"})


def select_tool_format(body: ChatBody, syntax: ModelSyntax) -> ToolFormat | None:
    """Return the format of the answer's calls; None if it can have none. Raises ApiError if tools are disabled."""
    if not body.offered_tools:
        return None
    if not syntax.offers_tools:
        raise ApiError(ErrorKind.UNSUPPORTED_FIELD, "tools: disabled on this server", param="tools")
    return syntax.tools


def call_grammar(
    body: ChatBody,
    form: ToolFormat,
    answer: Grammar | None,
    added_tokens: Mapping[str, int],
    prefix: str,
    answer_prefix: str,
    *,
    enforces_begun: bool = False,
) -> Grammar | None:
    """Return the grammar of an answer that may or must contain calls; None if nothing is enforced.

    answer is the requested grammar of an answer without calls. It is returned alone if calls cannot be distinguished
    from such an answer. prefix is Lark for the text that may come first; answer_prefix, before the answer alone.
    enforces_begun: whatever begins like a call must be one, in a format that the model was not trained on. Raises
    ApiError if the request requires both a call and another form, or if the grammar is too long.
    """
    if body.requires_call and answer is not None:
        invalid("tool_choice", "a required call cannot be combined with response_format or another grammar")
    functions = _callable_functions(body)
    is_within_text = bool(body.continue_final_message) and not prefix
    free = _free_answer(form, MarkedText(form.markers, added_tokens), is_within_text=is_within_text)
    more: tuple[str, ...] = ()
    begun = ""
    if body.requires_call:
        start = "calls"
    elif answer is not None:
        if answer.kind != "json_schema" or form.trigger is None:
            return with_prefix(answer, answer_prefix)
        start, more = "calls | answer", (_answer_rule(answer),)
    elif free is not None and (enforces_begun or any(function.strict for function in functions.values())):
        start, more = free
    elif enforces_begun and form.trigger is not None:
        (start, more), begun = _free_until(form.trigger), form.trigger
    else:
        return None
    is_required = body.requires_call or answer is not None
    enforces_all = enforces_begun or is_required
    max_calls = 1 if body.single_call or (begun and not form.opening) else form.max_calls

    def with_schemas(*, of_all: bool) -> str:
        schemas = {
            number: _schema(function) if of_all or function.strict else _ANY_OBJECT
            for number, function in functions.items()
        }
        rules = _call_rules(functions, schemas, form, added_tokens, max_calls, begun)
        return "\n".join((f"start: {prefix} ({start})", *more, *rules, *_COMMON_RULES))

    text = with_schemas(of_all=enforces_all)
    if enforces_all and len(text) > MAX_GRAMMAR_CHARACTERS and not is_required:
        text = with_schemas(of_all=False)
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        message = f"their schemas make a grammar of {len(text)} characters; the limit is {MAX_GRAMMAR_CHARACTERS}"
        invalid("tools", message)
    return Grammar("lark", text)


def _free_answer(form: ToolFormat, text: MarkedText, *, is_within_text: bool) -> tuple[str, tuple[str, ...]] | None:
    """Return Lark for an answer of texts and calls, and the rules that it needs.

    None if a text may begin like a call: calls must begin with a mark that is a token.
    """
    if form.messages is not None and text.has_all_markers:
        openings = " | ".join(map(text, form.messages.openings))
        separator = text(form.messages.separator)
        messages = f"(message {separator})* (message | calls)"
        start = f"TEXT ({separator} {messages})?" if is_within_text else messages
        return start, (f"message: ({openings}) TEXT",)
    before, mark = text.split(form.trigger or "")
    if not mark:
        return None
    if not before:
        return "TEXT (calls TEXT)*", ()
    # A text may end with the characters before the mark, so both are one terminal.
    return "(OPENING marked_calls)* TEXT", (f"OPENING: /(.|\\n)*/ {literal(before)}",)


def _free_until(trigger: str) -> tuple[str, tuple[str, ...]]:
    """Return Lark for an answer of texts and calls whose first mark is text, and the rules that it needs.

    A text cannot contain the mark. Each text and the mark behind it are one terminal.
    """
    rules = (f"FREE: /(.|\\n)*/ & ~/(.|\\n)*{_in_regex(trigger)}(.|\\n)*/", f"OPENING: FREE {literal(trigger)}")
    return "(OPENING marked_calls)* FREE", rules


def _in_regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def with_prefix(answer: Grammar, prefix: str) -> Grammar:
    """Put Lark for the text that may come first before a grammar.

    Only possible for a JSON schema: others are unchanged.
    """
    if answer.kind != "json_schema" or not prefix:
        return answer
    text = "\n".join((f"start: {prefix} answer", _answer_rule(answer), *_COMMON_RULES))
    return Grammar("lark", text) if len(text) <= MAX_GRAMMAR_CHARACTERS else answer


def reasoning_rule(form: ReasoningFormat, added_tokens: Mapping[str, int]) -> str:
    """Return Lark for optional reasoning; empty if its markers are not single tokens."""
    if any(marker not in added_tokens for marker in form.markers):
        return ""
    text = MarkedText(form.markers, added_tokens)
    return f"({text(form.opening)} TEXT {text(form.closing)} {follow_rule(form, added_tokens)})?"


def follow_rule(form: ReasoningFormat, added_tokens: Mapping[str, int]) -> str:
    """Return Lark for the text between a model's reasoning and the rest."""
    return MarkedText(form.markers, added_tokens)(form.follow) if form.follow.strip() else _GAP


def _answer_rule(answer: Grammar) -> str:
    return f"answer: {json_value(msgspec.json.decode(answer.text, type=dict[str, Any]))}"


def _callable_functions(body: ChatBody) -> dict[int, FunctionDefinition]:
    """Return the functions by their place in `tools`."""
    names = {tool.function.name for tool in body.offered_tools}
    if isinstance(choice := body.tool_choice, NamedTool):
        names = {choice.function.name}
    numbered = enumerate(tool.function for tool in body.tools or ())
    return {number: function for number, function in numbered if function.name in names}


def _call_rules(
    functions: dict[int, FunctionDefinition],
    schemas: dict[int, dict[str, Any]],
    form: ToolFormat,
    added_tokens: Mapping[str, int],
    max_calls: int,
    begun: str,
) -> list[str]:
    """Return the rule `calls` and the rules below it. Each schema is separate, so that its references stay valid.

    begun is the beginning of `marked_calls` if another terminal contains it.

    `failures` finds a tool's number in the names of its rules.
    """
    text = MarkedText(form.markers, added_tokens)
    repeated = f"({text(form.separator)} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    before, opening = text.split(form.opening.removeprefix(begun))
    rules = [
        f"calls: {text(before)} marked_calls",
        f"marked_calls: {text(opening)} call {repeated} {text(form.closing)}",
        "call: " + " | ".join(f"call_{number}" for number in functions),
    ]
    tagged = None if form.parameters is None else ParameterGrammar(form.parameters, text)
    for number, function in functions.items():
        before, after = form.around(function.name)
        if not form.opening:
            before = before.removeprefix(begun)
        schema, rule = schemas[number], f"tool_{number}"
        arguments = None if tagged is None else tagged.arguments(schema, rule, is_strict=bool(function.strict))
        if arguments is None:
            # Formats with parameters also read an object in JSON, which can express every schema.
            arguments = json_value(schema if function.strict else lenient(schema))
        rules += [
            f"call_{number}: {text(before)} {rule}_arguments {text(after)}",
            f"{rule}_arguments: {arguments}",
        ]
    return rules + (tagged.rules if tagged is not None else [])


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    return {**_ANY_OBJECT, **_pruned(function.parameters or {})}


def _pruned(schema: Any) -> Any:
    """Remove annotations: they make up most of many schemas, and do not affect what is valid."""
    if isinstance(schema, list):
        return [_pruned(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    pruned: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NAMED_SCHEMAS and isinstance(value, dict):
            pruned[name] = {key: _pruned(inner) for key, inner in value.items()}
        elif name not in _ANNOTATIONS:
            pruned[name] = value if name in _VALUES else _pruned(value)
    return pruned
