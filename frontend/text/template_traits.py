"""What a chat template makes of a message's parts, roles and calls: found once, by rendering short chats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.frontend.schemas.chat import (
    ChatBody,
    ChatMessage,
    ChatTool,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    MessageToolCall,
)

_FIRST, _SECOND = "wexalumina", "wozedarte"
"""Texts that no template writes by itself."""
_PARTS = [ContentPart("text", _FIRST), ContentPart("text", _SECOND)]
_TOOL = ChatTool(
    FunctionDefinition("look_up", "Looks up", {"type": "object", "properties": {"key": {"type": "string"}}})
)
_CALLS = [
    MessageToolCall(call_id, FunctionCall("look_up", f'{{"key": "{text}"}}'))
    for call_id, text in (("callAAAA1", _FIRST), ("callAAAA2", _SECOND))
]
"""Mistral's templates take ids of nine letters and digits only."""
_QUESTION = ChatMessage("user", "Hello")
_CALLING = ChatMessage("assistant", tool_calls=_CALLS[:1])


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """By default, those of a template that can do everything."""

    part_roles: frozenset[str] = frozenset({"system", "user", "assistant", "tool"})
    """Roles whose content the template takes as a list of parts. Others receive their texts joined."""
    parts_only_roles: frozenset[str] = frozenset()
    """Those of them whose content the template does not show when it is a text: SmolVLM's."""
    has_system: bool = True
    """Whether the template shows messages of the role system. If not, the user says what they say."""
    has_developer: bool = True
    """Whether the template shows messages of the role developer."""
    takes_calls_together: bool = True
    """Whether the template shows several calls of one message."""
    takes_empty_answers: bool = True
    """Whether a message of the assistant may be the empty text. If not, it is a part with that text."""
    takes_thinking_beside_text: bool = True
    """Whether a message with calls may have a text and `thinking`."""


def find_traits(render: Callable[[ChatBody], str | None], *, mentions_developer: bool) -> TemplateTraits:
    """Return a template's traits. render returns None for messages that the template refuses.

    A template that does not mention the role may write it, but its model does not know it.
    """

    def shown(*messages: ChatMessage) -> str | None:
        has_calls = any(message.tool_calls for message in messages)
        return render(ChatBody(messages=list(messages), tools=[_TOOL] if has_calls else None))

    def shows_answer(content: str | list[ContentPart]) -> bool:
        return shown(_QUESTION, ChatMessage("assistant", content), _QUESTION) is not None

    def shown_by_role(content: str | list[ContentPart]) -> dict[str, str | None]:
        return {
            "system": shown(ChatMessage("system", content), _QUESTION),
            "user": shown(ChatMessage("user", content)),
            "assistant": shown(_QUESTION, ChatMessage("assistant", content), _QUESTION),
            "tool": shown(_QUESTION, _CALLING, ChatMessage("tool", content, tool_call_id=_CALLS[0].id)),
        }

    as_text = shown_by_role(_FIRST)
    part_roles = frozenset(role for role, text in shown_by_role(_PARTS).items() if _has_texts_only(text))
    developer = shown(ChatMessage("developer", _FIRST), _QUESTION)
    together = shown(_QUESTION, ChatMessage("assistant", tool_calls=_CALLS))
    thoughtful = ChatMessage("assistant", "Well", tool_calls=_CALLS[:1], reasoning_content=_SECOND)
    alone = shown(_QUESTION, _CALLING)
    return TemplateTraits(
        part_roles=part_roles,
        parts_only_roles=frozenset(role for role in part_roles if _FIRST not in (as_text[role] or "")),
        has_system="system" in part_roles or _FIRST in (as_text["system"] or "") or shown(_QUESTION) is None,
        has_developer=mentions_developer and developer is not None and _FIRST in developer,
        takes_calls_together=alone is None or _FIRST not in alone or (together is not None and _SECOND in together),
        takes_empty_answers=shows_answer("") or not shows_answer([ContentPart("text", "")]),
        takes_thinking_beside_text=alone is None or shown(_QUESTION, thoughtful) is not None,
    )


def _has_texts_only(text: str | None) -> bool:
    """Whether both parts are shown, and not as Python or JSON writes a list."""
    if text is None or _FIRST not in text or _SECOND not in text:
        return False
    start, end = text.rindex(_FIRST), text.rindex(_SECOND)
    return start < end and "'type'" not in text[start:end] and '"type"' not in text[start:end]


def one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write each call as a message of its own, with its result behind it."""
    written: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    """Calls whose messages are not written yet."""
    for message in messages:
        if message["role"] == "tool":
            place = next(
                (n for n, call in enumerate(calls) if call["tool_calls"][0]["id"] == message.get("tool_call_id")), 0
            )
            written += calls[place : place + 1]
            del calls[place : place + 1]
        else:
            written += calls
            calls = []
        made = message.get("tool_calls", ())
        if len(made) > 1:
            first, *others = made
            silent = {"role": message["role"], "content": ""}
            calls = [{**message, "tool_calls": [first]}, *({**silent, "tool_calls": [call]} for call in others)]
        else:
            written.append(message)
    return written + calls


def said_by_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put what system messages say before what the user says next."""
    written: list[dict[str, Any]] = []
    texts: list[str] = []
    place = 0
    for message in messages:
        if message["role"] == "system":
            place = place if texts else len(written)
            texts.append(message["content"])
        elif message["role"] == "user" and texts:
            said, content = "\n\n".join((*texts, "")), message["content"]
            joined = said + content if isinstance(content, str) else [{"type": "text", "text": said}, *content]
            written.append({**message, "content": joined})
            texts = []
        else:
            written.append(message)
    if texts:
        written.insert(place, {"role": "user", "content": "\n\n".join(texts)})
    return written
