"""Finds the tokens that end an assistant's turn, as the model's own chat template writes them.

The files of many models name the end of a text only, and their answers would run on through turns of both sides. Turns
with a known content are rendered; what the template writes behind them shows how they end.
"""

from __future__ import annotations

from penstock.frontend.schemas.chat import (
    ChatBody,
    ChatMessage,
    ChatTool,
    FunctionCall,
    FunctionDefinition,
    MessageToolCall,
)
from penstock.frontend.text.chat_template import TemplateRefusedError
from penstock.frontend.text.render_budget import INLINE
from penstock.frontend.text.tokenizer import ModelTokenizer

_THOUGHT, _TEXT, _FIRST_CALL, _SECOND_CALL, _NEXT = "wikitorena", "welabrunto", "wosidenka", "wumarilok", "wadonefix"
"""Contents that no template writes by itself."""
_NAME = "look_up"
_TOOL = ChatTool(FunctionDefinition(_NAME, "Looks up", {"type": "object", "properties": {"key": {"type": "string"}}}))
_QUESTION = ChatMessage("user", "Hello")
_CALLS = [
    MessageToolCall(call_id, FunctionCall(_NAME, f'{{"key": "{mark}"}}'))
    for call_id, mark in (("callAAAA1", _FIRST_CALL), ("callAAAA2", _SECOND_CALL))
]
"""Mistral's templates take ids of nine letters and digits only."""
_RESULTS = [ChatMessage("tool", _NEXT, tool_call_id=call.id) for call in _CALLS]


def find_turn_ends(tokenizer: ModelTokenizer) -> tuple[int, ...]:
    """Return the token that ends answers and tool calls alike, or one for each; empty if the template shows none."""
    inner = _inner_tokens(tokenizer)
    text = _tokens_behind(tokenizer, ChatMessage("assistant", _TEXT), _TEXT, [ChatMessage("user", _NEXT)], inner)
    # Some templates take one call only.
    calls = _tokens_behind(tokenizer, _calling(_CALLS), _SECOND_CALL, _RESULTS, inner)
    calls = calls or _tokens_behind(tokenizer, _calling(_CALLS[:1]), _FIRST_CALL, _RESULTS[:1], inner)
    # A text or the calls may have a closing mark of their own before the end of the turn.
    common = [token_id for token_id in text if token_id in calls]
    return tuple(common[:1] or [*text[:1], *calls[:1]])


def _calling(calls: list[MessageToolCall]) -> ChatMessage:
    return ChatMessage("assistant", tool_calls=calls)


def _inner_tokens(tokenizer: ModelTokenizer) -> frozenset[int]:
    """Return the special tokens between reasoning and text, and between two calls. They end no turn."""
    thoughtful = ChatMessage("assistant", _TEXT, reasoning_content=_THOUGHT)
    inner: set[int] = set()
    for turn, first, second in (
        (thoughtful, _THOUGHT, _TEXT),
        (_calling(_CALLS), _FIRST_CALL, _SECOND_CALL),
    ):
        before, mark, _ = _render(tokenizer, [_QUESTION, turn]).rpartition(second)
        _, first_mark, between = before.rpartition(first)
        if mark and first_mark:
            inner.update(tokenizer.special_tokens_in(between))
    return frozenset(inner)


def _tokens_behind(
    tokenizer: ModelTokenizer, turn: ChatMessage, mark: str, following: list[ChatMessage], inner: frozenset[int]
) -> list[int]:
    """Return the special tokens behind the mark in the last turn, or else before the next message's text.

    Some templates close a turn only where another message follows, and in some the role of that message is the end.
    """
    for messages in ([_QUESTION, turn], [_QUESTION, turn, *following]):
        _, is_shown, behind = _render(tokenizer, messages).rpartition(mark)
        behind = behind.partition(_NEXT)[0] if is_shown else ""
        # Fine-tunes may have added the end of a turn like a word. Behind calls such tokens are marks of the call.
        tokens = tokenizer.special_tokens_in(behind, or_added=mark == _TEXT)
        if found := [token_id for token_id in tokens if token_id not in inner]:
            return found
    return []


def _render(tokenizer: ModelTokenizer, messages: list[ChatMessage]) -> str:
    """Return the rendered messages; nothing if the template refuses them."""
    has_calls = any(message.tool_calls for message in messages)
    body = ChatBody(messages=messages, tools=[_TOOL] if has_calls else None, add_generation_prompt=False)
    template = tokenizer.chat_template
    has_several = any(len(message.tool_calls or ()) > 1 for message in messages)
    if template is None or (has_several and not template.traits.takes_calls_together):
        return ""
    try:
        return template.render(body, INLINE)
    except TemplateRefusedError:
        return ""
