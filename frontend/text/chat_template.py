"""Renders a checkpoint's chat template as transformers does.

The template comes with the checkpoint and runs in a sandbox with a budget; clients cannot send one. It receives the
messages as plain dicts of strings.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jinja2

from penstock.frontend.schemas.chat import (
    ChatBody,
    ChatMessage,
    ChatTool,
    ContentPart,
    MessageToolCall,
    content_of,
)
from penstock.frontend.text.bounded_operations import BoundedContext
from penstock.frontend.text.bounded_sandbox import BoundedEnvironment
from penstock.frontend.text.render_budget import FULL, INLINE, OverBudget, Refused, RenderBudget, RenderLimits
from penstock.frontend.text.spellings import NO_SPELLINGS, MarkedText, Spellings, unmarked
from penstock.frontend.text.template_traits import TemplateTraits, find_traits, one_call_each, said_by_user
from penstock.frontend.transport.errors import ApiError, invalid

_MAX_TIME_FORMAT = 100
_MAX_REASON = 1000
"""Characters that are shown of what a template says."""

_END_MARK = secrets.token_hex(16)
"""Marks the end of the final message while rendering. Random: the template may repeat any text after the message."""


_NUMBERED_CALL = "<|tool_call_argument_begin|>"
"""A mark of templates that show the name of a called function only as part of the call's id: Kimi K2's."""


class TemplateRefusedError(Exception):
    """The template called raise_exception, or cannot render these messages. The message is the template's."""


class TooMuchWorkError(TemplateRefusedError):
    """Rendering takes more than the limits allow."""


class _TemplateRaised(jinja2.TemplateError):
    """The template called raise_exception."""


def _raise_exception(message: str) -> None:
    raise _TemplateRaised(message)


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_TIME_FORMAT:
        raise Refused(f"a format of strftime_now has {len(form)} characters; the limit is {_MAX_TIME_FORMAT}")
    return datetime.datetime.now().strftime(form)  # noqa: DTZ005 - local time, as in transformers


class ChatTemplate:
    """Renders messages to the prompt's text, with a beginning-of-sequence token if the template writes one."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """special_tokens maps names such as bos_token to texts. tool_source is the template for chats with tools, if
        there is a separate one. Raises ValueError for a template with a syntax error."""
        environment = BoundedEnvironment()
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self.tool_source = tool_source or source
        self._template = environment.bounded_template(source)
        self._tool_template = self._template if tool_source is None else environment.bounded_template(tool_source)
        self.thread = ThreadPoolExecutor(1, "render")
        """Renders what takes long. One thread: a template that always takes long makes only its own chats wait."""
        self._special_tokens = dict(special_tokens)
        self._numbers_calls = _NUMBERED_CALL in self.tool_source
        self.traits = TemplateTraits()
        self.traits = find_traits(self._rendered_or_none, mentions_developer="developer" in source)

    def check(self) -> None:
        """Render a short chat. Raises ValueError if that takes more than the limits allow."""
        try:
            self.render(ChatBody(messages=[ChatMessage("user", "Hello")]))
        except TooMuchWorkError as error:
            raise ValueError(f"the chat template cannot render a chat of one message: {error}") from None
        except TemplateRefusedError:
            return  # it wants other messages

    def render(self, body: ChatBody, limits: RenderLimits = FULL) -> str:
        """Return the prompt up to the start of the answer, which may continue the last message.

        Raises TemplateRefusedError, ApiError.
        """
        return self.render_marked(body, NO_SPELLINGS, limits).text

    def render_marked(self, body: ChatBody, spellings: Spellings, limits: RenderLimits = FULL) -> MarkedText:
        """Render; what the client spells is marked. Raises TemplateRefusedError, ApiError."""
        fixed = {
            "tools": [describe_tool(tool) for tool in body.offered_tools] or None,
            "documents": body.documents,
            "add_generation_prompt": not body.continue_final_message and body.add_generation_prompt is not False,
        }
        template = self._tool_template if body.offered_tools else self._template
        mark = ""
        variables = {**_variables(body, {"messages": None, **self._special_tokens, **fixed}), **fixed}

        def attempt(*, text_arguments: bool) -> MarkedText:
            nonlocal mark
            given = variables | {"messages": self._messages(body, text_arguments=text_arguments)}
            given, mark = spellings.mark(given, continues=body.continue_final_message is True)
            return spellings.settle(_render(template, given | self._special_tokens, limits), mark)

        try:
            try:
                prompt = attempt(text_arguments=False)
            except TypeError:
                # Some templates, such as DeepSeek's, concatenate the arguments of calls: those need a text.
                prompt = attempt(text_arguments=True)
        except ApiError:
            raise
        except _TemplateRaised as error:
            said = unmarked(str(error.message), mark)[:_MAX_REASON]
            raise TemplateRefusedError(f"line {_line_of(error, template)}: {said}") from None
        except (OverBudget, Refused) as error:
            raise TooMuchWorkError(f"line {_line_of(error, template)}: {error}") from None
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            cause = unmarked(f"{type(error).__name__}: {error}", mark)[:_MAX_REASON]
            raise TemplateRefusedError(
                f"line {_line_of(error, template)}: it cannot render these messages ({cause})"
            ) from None
        if not body.continue_final_message:
            return prompt
        return replace(prompt, text=_cut(prompt.text))

    def takes_apart(self, text: str) -> bool:
        """Whether the template looks for the text in an assistant's message, as for the end of reasoning."""
        if text not in self.source and text not in self.tool_source:
            return False
        question, shown = ChatMessage("user", "Hello"), f"Well{text}Now"
        rendered = self._rendered_or_none(ChatBody(messages=[question, ChatMessage("assistant", shown), question]))
        return rendered is not None and shown not in rendered

    def _rendered_or_none(self, body: ChatBody) -> str | None:
        try:
            return self.render(body, INLINE)
        except TemplateRefusedError:
            return None

    def _messages(self, body: ChatBody, *, text_arguments: bool = False) -> list[dict[str, Any]]:
        continued = body.messages[-1] if body.continue_final_message else None
        messages = [
            self._as_dict(message, text_arguments=text_arguments, continues=message is continued)
            for message in body.messages
        ]
        _name_results(messages)
        if self._numbers_calls:
            _number_calls(messages)
        if body.continue_final_message:
            last = messages[-1]
            last["content"] += _END_MARK
            if last["role"] in self.traits.parts_only_roles:
                last["content"] = [_part(ContentPart("text", last["content"]))]
        messages = messages if self.traits.has_system else said_by_user(messages)
        return messages if self.traits.takes_calls_together else one_call_each(messages)

    def _as_dict(self, message: ChatMessage, *, text_arguments: bool, continues: bool) -> dict[str, Any]:
        traits, role = self.traits, message.role
        if role == "developer" and not traits.has_developer:
            role = "system"
        content: Any = message.content
        if isinstance(content, list):
            takes_parts = role in traits.part_roles and not continues
            has_pictures = any(part.is_picture for part in content)
            content = [_part(part) for part in content] if takes_parts or has_pictures else content_of(content)
        elif content is None:
            content = ""  # many templates concatenate it
        if isinstance(content, str) and role in traits.parts_only_roles and not continues:
            content = [_part(ContentPart("text", content))]
        if not (content or continues or message.tool_calls or traits.takes_empty_answers or role != "assistant"):
            content = [{"type": "text", "text": ""}]
        withholds_thinking = message.tool_calls and content and not traits.takes_thinking_beside_text
        fields = {
            "role": role,
            "content": content,
            "name": message.name,
            "tool_call_id": message.tool_call_id,
            "tool_calls": [_tool_call(call, as_text=text_arguments) for call in message.tool_calls or ()] or None,
            "reasoning_content": message.reasoning_content,
            "reasoning": message.reasoning_content,  # vLLM's name, the only one that Solar's template reads
            "thinking": None if withholds_thinking else message.reasoning_content,  # gpt-oss's name
        }
        return {name: value for name, value in fields.items() if value is not None}


def _part(part: ContentPart) -> dict[str, Any]:
    return {"type": "image"} if part.is_picture else {"type": "text", "text": part.text_or_refusal or ""}


def _render(template: jinja2.Template, variables: dict[str, Any], limits: RenderLimits) -> str:
    context = cast("BoundedContext", template.new_context(variables))
    context.budget = RenderBudget(limits, variables)
    return "".join(template.root_render_func(context))


def _line_of(error: Exception, template: jinja2.Template) -> int:
    """Return the template's innermost line in the error's traceback."""
    line, frame = 1, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals.get("__jinja_template__") is template:
            line = template.get_corresponding_lineno(frame.tb_lineno)
        frame = frame.tb_next
    return line


def _variables(body: ChatBody, fixed: Mapping[str, object]) -> dict[str, Any]:
    """Return the variables that the request gives to the template. Raises ApiError."""
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in fixed:
            invalid(f"chat_template_kwargs.{name}", "set by the server; cannot be set here")
    if body.reasoning_enabled is not None:
        variables["enable_thinking"] = body.reasoning_enabled
        variables.setdefault("thinking", body.reasoning_enabled)  # the name in DeepSeek's and Granite's templates
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    return variables


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Add the function's name to tool results. Some templates need it; clients send only the id of the call."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    for message in messages:
        if message["role"] == "tool" and (name := names.get(message.get("tool_call_id"))) is not None:
            message.setdefault("name", name)


def _number_calls(messages: list[dict[str, Any]]) -> None:
    """Give calls and their results the ids that the model wrote: functions.name:number, counted from 0."""
    ids: dict[str, str] = {}
    num_calls = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            numbered = f"functions.{call['function']['name']}:{num_calls}"
            ids[call["id"]] = call["id"] = numbered
            num_calls += 1
        if message["role"] == "tool":
            called = message.get("tool_call_id", "")
            message["tool_call_id"] = ids.get(called, called)


def describe_tool(tool: ChatTool) -> dict[str, Any]:
    """Describe a tool in the form and order that models are trained on. Templates rely on all three fields."""
    function = tool.function
    parameters = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
    described = {"name": function.name, "description": function.description or "", "parameters": parameters}
    return {"type": "function", "function": described}


def _tool_call(call: MessageToolCall, *, as_text: bool) -> dict[str, Any]:
    """Describe a call. Most templates expect the arguments as an object; invalid JSON is passed on as text."""
    function: dict[str, Any] = {"name": call.function.name, "arguments": call.function.arguments.strip() or "{}"}
    if not as_text:
        with contextlib.suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(function["arguments"])
    return {"id": call.id, "type": "function", "function": function}


def _cut(text: str) -> str:
    """Cut the prompt after the last message, before what the template writes after it.

    White space at the message's end is kept, also where the template trims: the client wants it continued.
    """
    end = text.rfind(_END_MARK)
    if end < 0:
        raise TemplateRefusedError("it changes the final message, so the message cannot be continued")
    return text[:end]


def read_chat_template(model_dir: Path, tokenizer_config: Mapping[str, Any], name: str = "default") -> str | None:
    """Return the template's source from chat_template.jinja, chat_template.json or tokenizer_config.json, or None.

    A checkpoint may have more templates by name, such as tool_use for chats with tools: in the directory
    additional_chat_templates, or in a list in either of the two JSON files.
    """
    is_default = name == "default"
    own_file = model_dir / ("chat_template.jinja" if is_default else f"additional_chat_templates/{name}.jinja")
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    json_file = model_dir / "chat_template.json"
    config = json.loads(json_file.read_text(encoding="utf-8")) if json_file.is_file() else tokenizer_config
    template = config.get("chat_template") if isinstance(config, dict) else config
    if isinstance(template, list):
        # Several templates by name: [{"name": "default", "template": …}, …]
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get(name)
    elif not is_default:
        return None
    if template is not None and not isinstance(template, str):
        raise ValueError("chat_template is neither a string nor a list of named strings")
    return template


def read_template_file(path: Path) -> str:
    """Return the source of a template in a file of its own. Raises ValueError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"the chat template {path} is not text in UTF-8") from None
    except OSError as error:
        raise ValueError(f"the chat template {path} cannot be read: {error.strerror}") from None


def special_tokens_of(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token, … as texts; in the files each is a string or an object with `content`."""
    tokens = {}
    for name, value in tokenizer_config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens
