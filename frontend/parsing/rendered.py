"""What a chat template writes for known messages: the marks of calls, of reasoning and of answers are read off it."""

from __future__ import annotations

import json
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from penstock.frontend.schemas.chat import (
    ChatBody,
    ChatMessage,
    ChatTool,
    FunctionCall,
    FunctionDefinition,
    MessageToolCall,
)
from penstock.frontend.text.chat_template import TemplateRefusedError

if TYPE_CHECKING:
    from penstock.frontend.text.chat_template import ChatTemplate

THOUGHT, TEXT, QUESTION = "wikitorena", "welabrunto", "wadonefix"
"""Contents that no template writes by itself."""
NAMES = ("wosi_denka", "wuma_rilok")
_IDS = ("callAAAA1", "callAAAA2")
"""Mistral's templates take ids of nine letters and digits only."""

Arguments = dict[str, Any]
FULL: Arguments = {
    "city": "wabestolu",
    "note": 'a "b"\n<c>\\',
    "days": 31,
    "share": -0.5,
    "exact": True,
    "at": {"inner": "x", "k": [1, False, None]},
    "list": ["one", "two"],
    "empty": {},
}
PLAIN: Arguments = {"city": "wabestolu", "note": "wobistela"}
NUMBER: Arguments = {"days": 31}
PROBES = (FULL, PLAIN, NUMBER)
"""Arguments of the first call. Some templates write a text without quotes or every value as a text; then the simpler
arguments show the format."""
SECOND: Arguments = {"city": "wifostara"}

_PROPERTIES: dict[str, Any] = {
    "city": {"type": "string", "description": "A city"},
    "note": {"type": "string", "description": "A note"},
    "days": {"type": "integer", "description": "A number"},
    "share": {"type": "number", "description": "A share"},
    "exact": {"type": "boolean", "description": "A flag"},
    "at": {"type": "object", "description": "An object", "properties": {"inner": {"type": "string"}}},
    "list": {"type": "array", "description": "A list", "items": {"type": "string"}},
    "empty": {"type": "object", "description": "An object", "properties": {"inner": {"type": "string"}}},
}
PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["city"]}
FUNCTIONS = dict.fromkeys(NAMES, PARAMETERS)
_TOOLS = [ChatTool(FunctionDefinition(name, "Looks up", PARAMETERS)) for name in NAMES]


def calls_of(arguments: Arguments, num_calls: int) -> list[tuple[str, Arguments]]:
    """Return the names and arguments of the calls in a turn."""
    return list(zip(NAMES, (arguments, SECOND), strict=True))[:num_calls]


class Renderings:
    """Renders turns of an assistant that answers one question."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._prompts: dict[bool, str | None] = {}

    def turn(
        self,
        content: str | None = None,
        calls: list[tuple[str, Arguments]] | None = None,
        *,
        thought: str | None = None,
    ) -> str | None:
        """Return the text behind the question; None if the template cannot write such a turn."""
        made = [
            MessageToolCall(call_id, FunctionCall(name, json.dumps(arguments)))
            for call_id, (name, arguments) in zip(_IDS, calls or (), strict=False)
        ]
        answer = ChatMessage("assistant", content, tool_calls=made or None, reasoning_content=thought)
        return self._rendered([ChatMessage("user", QUESTION), answer], has_tools=True, is_prompt=False)

    def prompt(self, *, has_tools: bool = True) -> str | None:
        """Return the text behind the question in a prompt that the model answers."""
        if has_tools not in self._prompts:
            self._prompts[has_tools] = self._rendered(
                [ChatMessage("user", QUESTION)], has_tools=has_tools, is_prompt=True
            )
        return self._prompts[has_tools]

    @property
    def shows_tools(self) -> bool:
        """Whether the model sees the tools that a request offers."""
        body = self._body([ChatMessage("user", QUESTION)], has_tools=True, is_prompt=True)
        try:
            return NAMES[0] in self._template.render(body)
        except TemplateRefusedError:
            return False

    def _rendered(self, messages: list[ChatMessage], *, has_tools: bool, is_prompt: bool) -> str | None:
        try:
            text = self._template.render(self._body(messages, has_tools=has_tools, is_prompt=is_prompt))
        except TemplateRefusedError:
            return None
        _, mark, behind = text.rpartition(QUESTION)
        return behind if mark else None

    @staticmethod
    def _body(messages: list[ChatMessage], *, has_tools: bool, is_prompt: bool) -> ChatBody:
        return ChatBody(
            messages=messages,
            tools=_TOOLS if has_tools else None,
            add_generation_prompt=is_prompt,
            enable_thinking=True,
        )


def common_start(first: str, second: str) -> str:
    """Return the text that both begin with, up to the last mark that is whole in it."""
    start = commonprefix((first, second))
    opening = max(start.rfind("<"), start.rfind("["))
    is_cut = opening >= 0 and not any(character in start[opening:] for character in ">]\n ")
    return start[:opening] if is_cut else start


def common_end(first: str, second: str) -> str:
    """Return the text that both end with, from the first mark on that is whole in it."""
    end = commonprefix((first[::-1], second[::-1]))[::-1]
    closing = min((place for place in (end.find(">"), end.find("]")) if place >= 0), default=-1)
    is_cut = closing >= 0 and not any(character in end[:closing] for character in "<[\n ")
    return end[closing + 1 :] if is_cut else end


def ids_as_numbers(text: str, number: str) -> str:
    """Replace the ids of calls."""
    for call_id in _IDS:
        text = text.replace(call_id, number)
    return text
