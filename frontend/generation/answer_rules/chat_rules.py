"""The answer rules of a chat, from its body and the model's syntax of reasoning and tool calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.frontend.generation.answer_rules.lark import MarkedText
from penstock.frontend.generation.answer_rules.reasoning_start import AnswerStart, start_answer
from penstock.frontend.generation.answer_rules.requested_grammar import requested_grammar
from penstock.frontend.generation.answer_rules.rules import AnswerRules
from penstock.frontend.generation.answer_rules.tool_grammar import (
    call_grammar,
    follow_rule,
    reasoning_rule,
    select_tool_format,
    with_prefix,
)
from penstock.frontend.parsing.answer_parser import AnswerShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.frontend.generation.models.served_model import ServedModel
    from penstock.frontend.parsing.reasoning import ReasoningFormat
    from penstock.frontend.parsing.tool_formats.base import ToolFormat
    from penstock.frontend.schemas.chat import ChatBody


async def chat_answer_rules(body: ChatBody, prompt: list[int], served: ServedModel) -> tuple[list[int], AnswerRules]:
    """Return the prompt and the rules. The request may add the reasoning's markers to the prompt.

    prompt has the token ids of the rendered chat. Raises ApiError.
    """
    tools, reasoning = select_tool_format(body, served.syntax), served.syntax.reasoning
    grammar, added_tokens = requested_grammar(body), served.tokenizer.added_tokens
    start = AnswerStart(prompt)
    if reasoning is not None:
        needs_end = bool(body.thinking_budget) or grammar is not None or body.requires_call
        is_closed_form = grammar is not None and grammar.kind != "json_schema"
        start = await start_answer(
            body, prompt, reasoning, served.tokenizer, needs_end=needs_end, needs_answer=is_closed_form
        )
    prefix, answer_prefix = _grammar_prefixes(body, start, reasoning, added_tokens)
    if tools is not None:
        grammar = call_grammar(body, tools, grammar, added_tokens, prefix, answer_prefix)
    elif grammar is not None:
        grammar = with_prefix(grammar, answer_prefix)
    if tools is None and reasoning is None:
        return prompt, AnswerRules(grammar)
    end = () if start.end_id is None else (start.end_id,)
    rules = AnswerRules(
        grammar,
        grammar_after=() if grammar is None else end,
        thinking_budget_tokens=(body.thinking_budget or 0) if end else 0,
        thinking_end=end if body.thinking_budget else (),
        shape=AnswerShape(
            reasoning,
            is_reasoning_open=start.is_open,
            includes_reasoning=body.include_reasoning is not False,
            tools=tools,
            functions={tool.function.name: tool.function.parameters or {} for tool in body.offered_tools},
            calls_only=body.requires_call,
            single_call=body.single_call,
        ),
        kept_token_ids=_marker_ids((tools, reasoning), added_tokens),
    )
    return start.prompt, rules


def _grammar_prefixes(
    body: ChatBody, start: AnswerStart, reasoning: ReasoningFormat | None, added_tokens: Mapping[str, int]
) -> tuple[str, str]:
    """Return Lark for the text that may precede calls, and for the text before an answer.

    It allows optional reasoning, or the rest of open reasoning, and then the answer's opening.
    """
    if reasoning is None:
        return "", ""
    prefix = ""
    if start.is_undecided and body.reasoning_enabled is not False:
        prefix = reasoning_rule(reasoning, added_tokens)
    elif start.is_open:
        prefix = follow_rule(reasoning, added_tokens)
    opening = "" if start.is_answering else MarkedText(reasoning.markers, added_tokens)(reasoning.answer_opening)
    return prefix, f"{prefix} {opening}".strip()


def _marker_ids(
    formats: tuple[ToolFormat | None, ReasoningFormat | None], added_tokens: Mapping[str, int]
) -> frozenset[int]:
    markers = (marker for form in formats if form is not None for marker in form.markers)
    return frozenset(added_tokens[marker] for marker in markers if marker in added_tokens)
