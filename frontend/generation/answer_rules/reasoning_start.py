"""Decides where an answer starts: before the model's reasoning, within it, or after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.frontend.transport.errors import invalid

if TYPE_CHECKING:
    from penstock.frontend.parsing.reasoning import ReasoningFormat
    from penstock.frontend.schemas.chat import ChatBody
    from penstock.frontend.text.tokenizer import ModelTokenizer

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
