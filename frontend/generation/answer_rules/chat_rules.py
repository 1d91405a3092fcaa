"""Rules for the answers to one request: those of a chat, from its body and the model's syntax of reasoning and tool
calls.

An answer starts before the model's reasoning, within it, or after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.frontend.generation.answer_rules.lark import MarkedText
from penstock.frontend.generation.answer_rules.requested_grammar import requested_grammar
from penstock.frontend.generation.answer_rules.tool_grammar import (
    call_grammar,
    follow_rule,
    reasoning_rule,
    select_tool_format,
    with_prefix,
)
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.parsing.answer_parser import AnswerShape
from penstock.frontend.parsing.reasoning import ReasoningFormat
from penstock.frontend.parsing.tool_formats.base import ToolFormat
from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.text.tokenizer import ModelTokenizer
from penstock.frontend.transport.errors import invalid
from penstock.shm.messages import Grammar


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """The required form of the answers, and how they are parsed. The backend enforces all but the shape."""

    grammar: Grammar | None = None
    grammar_after: tuple[int, ...] = ()
    """Token ids after which the grammar applies; empty: from the start."""
    thinking_budget_tokens: int = 0
    """Tokens of reasoning after which thinking_end is forced; 0 is no limit."""
    thinking_end: tuple[int, ...] = ()
    shape: AnswerShape | None = None
    """How the text is parsed; None: all of it is the answer's text."""
    kept_token_ids: frozenset[int] = frozenset()
    """Special tokens that the parser needs."""

    @property
    def text_may_end_answer(self) -> bool:
        """Whether the parser may end the answer before the model does: after a tool call, if one is enough."""
        return self.shape is not None and self.shape.tools is not None


_TAIL_TOKENS = 32
"""Enough last tokens of a prompt to contain a marker, even one that is spelled byte by byte."""


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """The prompt, and the state of the reasoning at its end."""

    prompt: list[int]
    is_open: bool = False
    """The answer starts within the reasoning."""
    is_undecided: bool = False
    """The model may open its reasoning or not."""
    is_answering: bool = False
    """The answer starts after the reasoning and after any text before the answer."""
    end_id: int | None = None
    """The token that ends open reasoning, if it is a single token."""


async def start_answer(
    body: ChatBody,
    prompt: list[int],
    form: ReasoningFormat,
    tokenizer: ModelTokenizer,
    *,
    needs_end: bool,
    needs_answer: bool,
) -> AnswerStart:
    """Append the reasoning's markers to the prompt if the request decides whether the model reasons.

    needs_end: the end of the reasoning must be recognized, because of a budget or of a grammar that applies after it.
    needs_answer: the answer must start with its text, because of a grammar that nothing can precede.
    Raises ApiError if there is a budget and the end is not a single token.
    """

    async def with_text(text: str) -> list[int]:
        return prompt + (await tokenizer.encode([text], add_special_tokens=False))[0]

    is_open, is_closed = _state(body, prompt, form, tokenizer)
    if needs_answer and form.answer_opening and not (is_open or is_closed):
        return AnswerStart(await with_text(form.answer_opening), is_answering=True)
    if body.thinking_budget == 0 and not is_closed:
        return AnswerStart(await with_text(f"{form.closing}{form.follow}" if is_open else form.empty))
    if is_closed or not (is_open or (needs_end and body.reasoning_enabled)):
        return AnswerStart(prompt, is_undecided=not is_closed, is_answering=is_closed)
    end_id = tokenizer.added_tokens.get(form.closing)
    if needs_end and end_id is None:
        if body.thinking_budget:
            invalid("thinking_budget", "not available: this model does not end its reasoning with a single token")
        return AnswerStart(await with_text(f"{form.closing}{form.follow}") if is_open else prompt)
    opened = prompt if is_open else await with_text(f"{form.opening}{form.line_break}")
    return AnswerStart(opened, is_open=True, end_id=end_id)


def _state(body: ChatBody, prompt: list[int], form: ReasoningFormat, tokenizer: ModelTokenizer) -> tuple[bool, bool]:
    """Return whether the prompt ends within open reasoning, and whether it ends after closed reasoning."""
    if body.continue_final_message:
        content = body.messages[-1].content
        text = content if isinstance(content, str) else ""
        is_open = text.rfind(form.opening) > text.rfind(form.closing)
        return is_open, not is_open
    tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    return tail.endswith(form.opening), tail.endswith(form.answer_opening or form.closing)


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
        grammar = call_grammar(
            body,
            tools,
            grammar,
            added_tokens,
            prefix,
            answer_prefix,
            enforces_begun=served.syntax.is_generic,
        )
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
