"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct
from msgspec.structs import force_setattr

from penstock.frontend.schemas.generation import ABSENT, GenerationBody, MaxTokens, ShortText, limit_of
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten
from penstock.shm.messages import MAX_CONTEXT_TOKENS, MAX_LOGPROBS

MAX_SCHEMA_DEPTH = 64
PICTURE = "image_url"
"""The type of a part that is a picture."""

Role = Literal["system", "developer", "user", "assistant", "tool"]
FunctionName = Annotated[str, Meta(min_length=1, max_length=128, pattern="^[a-zA-Z0-9_.-]+$")]
"""OpenAI allows 64 characters, Anthropic 128. Clients put a server's name before the names of its tools."""


class ImageUrl(Struct, frozen=True):
    """A picture as a data URI, or where to fetch it. The model's image processor alone decides about detail."""

    url: Annotated[str, Meta(min_length=1)]
    detail: Annotated[str, Meta(max_length=64)] | None = None


class ContentPart(Struct, frozen=True):
    """A part of a message's content. The text of a refusal, which clients send back, is in `refusal`."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[str, Meta(min_length=1)] | ImageUrl | None = None

    @property
    def text_or_refusal(self) -> str | None:
        return self.refusal if self.type == "refusal" else self.text

    @property
    def is_picture(self) -> bool:
        return self.type == PICTURE

    @property
    def picture_url(self) -> str:
        return self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url or ""


class PicturePart(ContentPart, frozen=True):
    """A picture of another endpoint's body."""

    path: str = ""
    """That body's name of it, for errors."""


def picture_part(url: str, path: str) -> ContentPart:
    return PicturePart(PICTURE, image_url=url, path=path)


def text_of(content: str | Sequence[ContentPart] | None) -> str:
    """Return a content's text, without its pictures."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text_or_refusal or "" for part in content or () if not part.is_picture)


def content_of(parts: Sequence[ContentPart]) -> str | list[ContentPart]:
    """Return a message's content: one text if there is no picture among the parts."""
    if any(part.is_picture for part in parts):
        return list(parts)
    return text_of(parts)


class FunctionCall(Struct, frozen=True):
    """A call of a function; arguments is a JSON object as a string."""

    name: FunctionName
    arguments: str = ""


class MessageToolCall(Struct, frozen=True):
    id: ShortText
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(Struct, frozen=True):
    role: Role
    content: str | Annotated[list[ContentPart], Meta(max_length=2048)] | None = None
    name: ShortText | None = None
    tool_call_id: ShortText | None = None
    tool_calls: Annotated[list[MessageToolCall], Meta(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's and OpenRouter's name for reasoning_content, which takes its value."""
    function_call: Raw = ABSENT

    def __post_init__(self) -> None:
        if self.reasoning_content is None and self.reasoning is not None:
            force_setattr(self, "reasoning_content", self.reasoning)


class FunctionDefinition(Struct, frozen=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Struct, frozen=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(Struct, frozen=True):
    name: FunctionName


class NamedTool(Struct, frozen=True, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTools(Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=128)]


class AllowedToolsChoice(Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """tool_choice that allows only some of the tools."""

    allowed_tools: AllowedTools

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.allowed_tools.tools)


class ChatBody(GenerationBody, kw_only=True):
    """A chat. max_tokens is the older name of max_completion_tokens."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=2048)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[ChatTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: bool | None = None
    thinking_budget: Annotated[int, Meta(ge=0, le=MAX_CONTEXT_TOKENS)] | None = None
    """Tokens of reasoning after which its end is forced."""
    thinking_token_budget: Annotated[int, Meta(ge=0, le=MAX_CONTEXT_TOKENS)] | None = None
    """vLLM's name for thinking_budget; `check_chat` moves the value there."""
    include_reasoning: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=256)] | None = None
    return_progress: bool | None = None
    """llama.cpp's: a stream's first chunk reports how much of the prompt was computed, and how long that took."""

    audio: Raw = ABSENT
    best_of: Raw = ABSENT
    chat_template: Raw = ABSENT
    echo: Raw = ABSENT
    function_call: Raw = ABSENT
    functions: Raw = ABSENT
    modalities: Raw = ABSENT
    web_search_options: Raw = ABSENT

    def __post_init__(self) -> None:
        super().__post_init__()
        self.max_tokens = limit_of(self.max_tokens)
        self.max_completion_tokens = limit_of(self.max_completion_tokens)

    @property
    def offered_tools(self) -> list[ChatTool]:
        """The tools that the model may call."""
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return [tool for tool in self.tools or () if tool.function.name in self.tool_choice.names]
        return self.tools or []

    @property
    def requires_call(self) -> bool:
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def single_call(self) -> bool:
        """Whether the first call ends the answer."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)

    @property
    def reasoning_enabled(self) -> bool | None:
        """Whether the answer begins with reasoning; None leaves it to the model."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if self.thinking_budget is not None:
            return self.thinking_budget > 0
        return None if self.reasoning_effort is None else self.reasoning_effort != "none"

    @property
    def num_logprobs(self) -> int:
        """Top log probabilities per token of the answer; -1 for none at all."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    @property
    def requested_max_tokens(self) -> tuple[str, int | None]:
        """The field that limits the answer's length, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def prompt_field(self) -> str:
        """The field that contains the prompt."""
        return "messages"


def check_chat(body: ChatBody) -> None:
    """Check rules that the types of single fields cannot express. Raises ApiError."""
    for position, message in enumerate(body.messages):
        _check_message(f"messages[{position}]", message)
    _check_tools(body)
    if body.thinking_token_budget is not None:
        if body.thinking_budget is not None:
            invalid("thinking_token_budget", "cannot be combined with thinking_budget, its other name")
        body.thinking_budget, body.thinking_token_budget = body.thinking_token_budget, None
    field, limit = body.requested_max_tokens
    if limit == 0:
        invalid(field, "must be at least 1, got 0; -1 is the rest of the context")
    if body.top_logprobs and not body.logprobs:
        invalid("top_logprobs", "needs logprobs to be true")
    if body.continue_final_message:
        last = body.messages[-1]
        if last.role != "assistant" or last.content is None:
            invalid("continue_final_message", "the last message must be from the assistant and have content")
        if body.add_generation_prompt:
            invalid("add_generation_prompt", "cannot be true together with continue_final_message")


def _check_tools(body: ChatBody) -> None:
    names: set[str] = set()
    for position, tool in enumerate(body.tools or ()):
        path, function = f"tools[{position}].function", tool.function
        if function.name in names:
            invalid(f"{path}.name", f"{shorten(function.name)} is defined twice")
        names.add(function.name)
        if (function.parameters or {}).get("type", "object") != "object":
            invalid(f"{path}.parameters.type", 'must be "object"')
        if not is_shallow(function.parameters, MAX_SCHEMA_DEPTH):
            invalid(f"{path}.parameters", f"nested more than {MAX_SCHEMA_DEPTH} deep")
    if body.requires_call and not names:
        invalid("tool_choice", "needs tools")
    choice = body.tool_choice
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        invalid("tool_choice.function.name", f"{shorten(choice.function.name)} is not one of the tools")
    for position, allowed in enumerate(choice.allowed_tools.tools if isinstance(choice, AllowedToolsChoice) else ()):
        if allowed.function.name not in names:
            path = f"tool_choice.allowed_tools.tools[{position}].function.name"
            invalid(path, f"{shorten(allowed.function.name)} is not one of the tools")


_TEXT_PARTS = ("text", "refusal")
_PARTS = (*_TEXT_PARTS, PICTURE)
_CONTAINERS = frozenset({dict, list})


def is_shallow(value: object, depth: int) -> bool:
    """Whether a decoded JSON value has at most this depth. Iterative: a value may have a million members."""
    level: list[Any] = [value] if type(value) in _CONTAINERS else []
    for _ in range(depth):
        members = chain.from_iterable(item.values() if type(item) is dict else item for item in level)
        level = [item for item in members if type(item) in _CONTAINERS]
        if not level:
            return True
    return not level


def _check_message(path: str, message: ChatMessage) -> None:
    if bytes(message.function_call) not in (b"", b"null"):
        param = f"{path}.function_call"
        raise ApiError(
            ErrorKind.UNSUPPORTED_FIELD, f"{param}: not supported by this server; use tool_calls", param=param
        )
    if message.content is None and message.role != "assistant":
        invalid(f"{path}.content", f"required in a message of role {message.role}")
    if isinstance(message.content, list):
        for position, part in enumerate(message.content):
            allowed = _PARTS if message.role == "user" else _TEXT_PARTS
            if part.type not in allowed:
                where = f"{path}.content[{position}].type"
                invalid(where, f"must be one of {', '.join(allowed)} in role {message.role}, got {shorten(part.type)}")
            if (part.image_url if part.is_picture else part.text_or_refusal) is None:
                invalid(f"{path}.content[{position}].{part.type}", "missing")
