"""How a chat's answer begins, what it must look like and how it is read: by its body and by what the model is like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.frontend.generation.answer_rules.requested_grammar import requested_grammar
from penstock.frontend.generation.answer_rules.tool_grammar import (
    GAP,
    after_reasoning,
    call_grammar,
    reasoning_rule,
    tool_format,
)
from penstock.frontend.generation.submission import AnswerRules
from penstock.frontend.parsing.answer import AnswerShape
from penstock.frontend.transport.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.frontend.generation.served_model import ServedModel
    from penstock.frontend.parsing.reasoning import ReasoningFormat
    from penstock.frontend.parsing.tool_formats.base import ToolFormat
    from penstock.frontend.schemas.chat import ChatBody
    from penstock.frontend.text.tokenizer import ModelTokenizer

_TAIL_TOKENS = 32
"""In these a marker at the prompt's end is found, even where it is spelled byte by byte."""


async def chat_answer_rules(body: ChatBody, prompt: list[int], served: ServedModel) -> tuple[list[int], AnswerRules]:
    """The prompt, with the reasoning's markers behind it where the request decides on it, and the guidance.

    prompt is what the chat template makes of the body. Raises ApiError.
    """
    form, reasoning = tool_format(body, served.syntax), served.syntax.reasoning
    grammar, added_tokens = requested_grammar(body), served.tokenizer.added_tokens
    start = _Start(prompt)
    if reasoning is not None:
        is_limited = bool(body.thinking_budget) or grammar is not None or body.must_call
        start = await _begin_reasoning(body, prompt, reasoning, served.tokenizer, is_limited=is_limited)
    before = _before_grammar(body, start, reasoning, added_tokens)
    if form is not None:
        grammar = call_grammar(body, form, grammar, added_tokens, before)
    elif grammar is not None:
        grammar = after_reasoning(grammar, before)
    if form is None and reasoning is None:
        return prompt, AnswerRules(grammar)
    end = () if start.end_id is None else (start.end_id,)
    guidance = AnswerRules(
        grammar,
        grammar_after=() if grammar is None else end,
        thinking_budget_tokens=(body.thinking_budget or 0) if end else 0,
        thinking_end=end if body.thinking_budget else (),
        make_parser=AnswerShape(
            reasoning,
            is_reasoning_open=start.is_open,
            tells_reasoning=body.include_reasoning is not False,
            tools=form,
            function_names=frozenset(tool.function.name for tool in body.offered_tools),
            one_call=body.calls_once,
        ),
        may_end_answer=form is not None,
        kept_token_ids=_token_ids((form, reasoning), added_tokens),
    )
    return start.prompt, guidance


def _token_ids(
    formats: tuple[ToolFormat | None, ReasoningFormat | None], added_tokens: Mapping[str, int]
) -> frozenset[int]:
    markers = (marker for form in formats if form is not None for marker in form.markers)
    return frozenset(added_tokens[marker] for marker in markers if marker in added_tokens)


@dataclass(frozen=True, slots=True)
class _Start:
    """Where the answer starts."""

    prompt: list[int]
    is_open: bool = False
    """Within the reasoning."""
    is_undecided: bool = False
    """The model itself opens the reasoning, or does not."""
    end_id: int | None = None
    """The token with which open reasoning ends, where it is one."""


def _before_grammar(
    body: ChatBody, start: _Start, reasoning: ReasoningFormat | None, added_tokens: Mapping[str, int]
) -> str:
    """What stands between the answer's start, or the end of open reasoning, and what a grammar asks for; in Lark."""
    if reasoning is not None and start.is_undecided and body.thinks is not False:
        return reasoning_rule(reasoning, added_tokens)
    return GAP if start.is_open else ""


async def _begin_reasoning(
    body: ChatBody, prompt: list[int], form: ReasoningFormat, tokenizer: ModelTokenizer, *, is_limited: bool
) -> _Start:
    """is_limited: there is a budget, or a grammar behind the reasoning, so that its end must be recognised."""

    async def with_text(text: str) -> list[int]:
        return prompt + (await tokenizer.encode([text], add_special_tokens=False))[0]

    is_open, is_closed = _state(body, prompt, form, tokenizer)
    if body.thinking_budget == 0 and not is_closed:
        return _Start(await with_text(("" if is_open else f"{form.opening}\n\n") + f"{form.closing}\n\n"))
    if is_closed or not (is_open or (is_limited and body.thinks)):
        return _Start(prompt, is_undecided=not is_closed)
    end_id = tokenizer.added_tokens.get(form.closing)
    if is_limited and end_id is None:
        if body.thinking_budget:
            invalid("thinking_budget", "this model marks the end of its reasoning in ways that cannot be limited")
        return _Start(await with_text(f"{form.closing}\n\n") if is_open else prompt)
    return _Start(prompt if is_open else await with_text(f"{form.opening}\n"), is_open=True, end_id=end_id)


def _state(body: ChatBody, prompt: list[int], form: ReasoningFormat, tokenizer: ModelTokenizer) -> tuple[bool, bool]:
    """Whether the prompt has opened the answer's reasoning, and whether it has closed it, too."""
    if body.continue_final_message:
        text = body.messages[-1].content
        said = text if isinstance(text, str) else ""
        is_open = said.rfind(form.opening) > said.rfind(form.closing)
        return is_open, not is_open
    tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    return tail.endswith(form.opening), tail.endswith(form.closing)
