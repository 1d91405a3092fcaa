"""What a chat template writes for known messages: the marks of calls, of reasoning and of answers are read off it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from penstock.frontend.parsing.tool_formats.parameters import common_prefix
from penstock.frontend.schemas.chat import (
    ChatBody,
    ChatMessage,
    ChatTool,
    FunctionCall,
    FunctionDefinition,
    MessageToolCall,
)
from penstock.frontend.text.chat_template import ChatTemplate, TemplateRefusedError
from penstock.frontend.text.render_budget import INLINE

THOUGHT, TEXT, QUESTION = "wikitorena", "welabrunto", "wadonefix"
"""Contents that no template writes by itself."""
NAMES = ("wosi_denka", "wuma_rilok")
_IDS = ("callAAAA1", "callAAAA2")
"""Mistral's templates take ids of nine letters and digits only."""

_REST_OF_MARK = re.compile(r"^([^<>\[\s]*>|[A-Z_ ]+\])")

Arguments = dict[str, Any]
Call = tuple[str, Arguments]
FULL: Arguments = {
    "city": "wabestolu",
    "note": 'a "b"\n<c>\\',
    "days": 70315,
    "share": -0.5,
    "exact": True,
    "at": {"inner": "x", "k": [1, False, None]},
    "list": ["one", "two"],
    "empty": {},
}
PLAIN: Arguments = {"city": "wabestolu", "note": "wobistela"}
NUMBER: Arguments = {"days": 70315}
SECOND: Arguments = {"city": "wifostara"}
PROBES = ((FULL, SECOND), (PLAIN, SECOND), (NUMBER, NUMBER))
"""Arguments of two calls. Some templates write a text without quotes or every value as a text; then the simpler
arguments show the format."""

_PROPERTIES: dict[str, Any] = {
    "city": {"type": "string", "description": "A city"},
    "note": {"type": "string", "description": "A note"},
    "days": {"type": "integer", "description": "A number"},
    "share": {"type": "number", "description": "A share"},
    "exact": {"type": "boolean", "description": "A flag"},
    "at": {"type": "object", "description": "An object", "additionalProperties": {"type": "string"}},
    "list": {"type": "array", "description": "A list", "items": {"type": "string"}},
    "empty": {"type": "object", "description": "An object", "additionalProperties": {"type": "string"}},
}
PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["city"]}
FUNCTIONS = dict.fromkeys(NAMES, PARAMETERS)
_TOOLS = [ChatTool(FunctionDefinition(name, "Looks up", PARAMETERS)) for name in NAMES]


def are_shown(calls: list[Call], text: str) -> bool:
    """Whether the calls are part of a text."""
    return all(name in text and str(next(iter(arguments.values()))) in text for name, arguments in calls)


def calls_of(arguments: Iterable[Arguments]) -> list[Call]:
    """Return the names and arguments of the calls in a turn."""
    return list(zip(NAMES, arguments, strict=False))


class Renderings:
    """Renders turns of an assistant that answers one question."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def turn(
        self,
        content: str | None = None,
        calls: list[Call] | None = None,
        *,
        thought: str | None = None,
    ) -> str | None:
        """Return the text behind the question; None if the template cannot write such a turn."""
        made = [
            MessageToolCall(call_id, FunctionCall(name, json.dumps(arguments)))
            for call_id, (name, arguments) in zip(_IDS, calls or (), strict=False)
        ]
        answer = ChatMessage("assistant", content, tool_calls=made or None, reasoning_content=thought)
        return self._behind_question([answer])

    @cached_property
    def prompt(self) -> str:
        """The text behind the question in a prompt that the model answers."""
        return self._behind_question([], is_prompt=True) or ""

    @cached_property
    def answer(self) -> str:
        """The turn of an answer that is a text."""
        return self.turn(TEXT) or ""

    @property
    def most_calls(self) -> int:
        """Calls that a turn may have."""
        return 2 if self._template.traits.takes_calls_together else 1

    @property
    def shows_tools(self) -> bool:
        """Whether the model sees the tools that a request offers."""
        question = ChatMessage("user", QUESTION)
        return any(
            NAMES[0] in (self._rendered(messages, is_prompt=True) or "")
            for messages in ([question], [ChatMessage("system", TEXT), question])
        )

    @property
    def shows_results(self) -> bool:
        """Whether the template writes results behind an answer."""
        result = ChatMessage("tool", TEXT, tool_call_id=_IDS[0])
        return TEXT in (self._behind_question([ChatMessage("assistant", "Well"), result]) or "")

    def _behind_question(self, messages: list[ChatMessage], *, is_prompt: bool = False) -> str | None:
        text = self._rendered([ChatMessage("user", QUESTION), *messages], is_prompt=is_prompt) or ""
        _, mark, behind = text.rpartition(QUESTION)
        return behind if mark else None

    def _rendered(self, messages: list[ChatMessage], *, is_prompt: bool) -> str | None:
        body = ChatBody(messages=messages, tools=_TOOLS, add_generation_prompt=is_prompt, enable_thinking=True)
        try:
            return self._template.render(body, INLINE)
        except TemplateRefusedError:
            return None


def common_start(first: str, second: str) -> str:
    """Return the text that both begin with, up to the last mark that is whole in it."""
    start = common_prefix(first, second)
    opening = max(start.rfind("<"), start.rfind("["))
    is_cut = opening >= 0 and not any(character in start[opening:] for character in ">]\n ")
    return start[:opening] if is_cut else start


def common_end(first: str, second: str) -> str:
    """Return the text that both end with, from the first mark on that is whole in it."""
    end = common_prefix(first[::-1], second[::-1])[::-1]
    return _REST_OF_MARK.sub("", end)


def ids_as_numbers(text: str, number: str) -> str:
    """Replace the ids of calls."""
    for call_id in _IDS:
        text = text.replace(call_id, number)
    return text
