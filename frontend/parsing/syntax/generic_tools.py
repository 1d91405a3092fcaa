"""Tools, calls and results that a chat template does not show become part of the messages. Models whose templates show
no tools so have the generic form of tools."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.frontend.parsing.syntax.named_formats import MARKS
from penstock.frontend.parsing.tool_formats.base import CALL_NUMBER, ToolFormat
from penstock.frontend.parsing.tool_formats.marked import Marked
from penstock.frontend.parsing.tool_formats.pythonic import Pythonic, keyword_arguments
from penstock.frontend.schemas.chat import ChatBody, ChatMessage, ChatTool, ContentPart, MessageToolCall
from penstock.frontend.text.chat_template import describe_tool
from penstock.frontend.text.spellings import own

GENERIC = "generic"

_Content = str | list[ContentPart]

_INSTRUCTION = """\
You have these functions:
<tools>
{tools}
</tools>

If one of them helps, call it before you answer. You then get its result. A call has this form:
{example}"""
_RESULT = "Result of {name}:"
"""Plain words: small models repeat marks such as <tool_response> instead of answering."""


@dataclass(frozen=True, slots=True)
class GenericTools:
    """Writes tools, calls and results as text of the messages."""

    form: ToolFormat
    shows_calls: bool
    """Whether the template itself writes calls, in this form, and their results."""
    shows_tools: bool = False
    shows_results: bool = False
    """Whether the template itself writes results behind calls that are text."""

    def written(self, body: ChatBody) -> ChatBody:
        """Return the chat as the template can show it."""
        messages = body.messages
        if not self.shows_calls:
            messages = messages if self.shows_results else _with_results_by_user(messages)
            messages = [self._with_calls_in_text(message) for message in messages]
        if body.offered_tools and not self.shows_tools:
            messages = self._with_tools(messages, body.offered_tools)
        if messages == body.messages:
            return body
        shown = copy.copy(body)
        shown.messages = messages
        if not (self.shows_calls or self.shows_tools):
            shown.tools = None
        return shown

    def _with_tools(self, messages: list[ChatMessage], tools: list[ChatTool]) -> list[ChatMessage]:
        described = "\n".join(json.dumps(describe_tool(tool), ensure_ascii=False) for tool in tools)
        example = self._call_text([("NAME", '{"ARGUMENT": "VALUE"}')])
        text = _INSTRUCTION.format(tools=described, example=example)
        roles = ("system", "developer")
        place = next((number for number, message in enumerate(messages) if message.role in roles), None)
        if place is None:
            return [ChatMessage("system", text), *messages]
        joined = _joined(messages[place].content or "", text)
        return [*messages[:place], replace(messages[place], content=joined), *messages[place + 1 :]]

    def _with_calls_in_text(self, message: ChatMessage) -> ChatMessage:
        if not message.tool_calls:
            return message
        calls = self._call_text(map(_name_and_arguments, message.tool_calls), own)
        return replace(message, content=_joined(message.content or "", calls), tool_calls=None)

    def _call_text(self, calls: Iterable[tuple[str, str]], layout: Callable[[str], str] = str) -> str:
        """Return calls as text. layout changes the form's own parts, those around names and arguments."""
        is_pythonic = isinstance(self.form, Pythonic)
        texts = (
            f"{name}({keyword_arguments(arguments)})"
            if is_pythonic
            else arguments.join(map(layout, self.form.around(name)))
            for name, arguments in calls
        )
        text = f"{layout(self.form.opening)}{layout(self.form.separator).join(texts)}{layout(self.form.closing)}"
        return text.replace(CALL_NUMBER, "0")


def generic_tools(found: ToolFormat | None, added_tokens: Iterable[str], *, shows_calls: bool) -> GenericTools:
    """Return the generic form: in the found format if an example in JSON describes it and a mark begins its calls."""
    if isinstance(found, Marked) and found.parameters is None and (shows_calls or found.trigger is not None):
        return GenericTools(found, shows_calls)
    return GenericTools(Marked(GENERIC, MARKS["hermes"], added_tokens), shows_calls=False)


def _with_results_by_user(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Make results messages of the user. What the user says behind them joins them: roles may have to alternate."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
    written: list[ChatMessage] = []
    is_behind_result = False
    for message in messages:
        shown = message
        if message.role == "tool":
            title = _RESULT.format(name=message.name or names.get(message.tool_call_id or "", "the call"))
            shown = ChatMessage("user", _joined(title, message.content or ""))
        if shown.role == "user" and is_behind_result:
            written[-1] = replace(written[-1], content=_joined(written[-1].content or "", shown.content or ""))
        else:
            written.append(shown)
            is_behind_result = message.role == "tool"
    return written


def _name_and_arguments(call: MessageToolCall) -> tuple[str, str]:
    return call.function.name, call.function.arguments.strip() or "{}"


def _joined(*contents: _Content) -> _Content:
    """Join contents, each on a line of its own."""
    present = [content for content in contents if content]
    if all(isinstance(content, str) for content in present):
        return "\n".join(map(str, present))
    parts = [[ContentPart("text", content)] if isinstance(content, str) else content for content in present]
    return [part for more in parts for part in more]
