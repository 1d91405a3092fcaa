"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's request bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.frontend.schemas.chat import FunctionName
from penstock.frontend.schemas.decoding import decode_body
from penstock.frontend.schemas.generation import (
    ABSENT,
    MAX_STOP_STRINGS,
    GenerationBody,
    ShortText,
    StopString,
    TypeName,
)
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten
from penstock.shm.messages import MAX_CONTEXT_TOKENS

_MAX_BLOCKS = 2048


class ImageSource(Struct, frozen=True):
    """A picture in base64 with its media type, or where to fetch it. Other blocks have sources of other types."""

    type: TypeName | None = None
    media_type: TypeName | None = None
    data: str | None = None
    url: str | None = None

    @property
    def data_uri(self) -> str:
        return self.url or "" if self.type == "url" else f"data:{self.media_type};base64,{self.data}"


class ResultBlock(Struct, frozen=True):
    """A part of a tool result."""

    type: TypeName
    text: str | None = None
    source: ImageSource | None = None


class ContentBlock(Struct, frozen=True):
    """A block of a message's content. Which fields are required depends on the type."""

    type: TypeName
    text: str | None = None
    thinking: str | None = None
    id: ShortText | None = None
    name: FunctionName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: ShortText | None = None
    content: str | Annotated[list[ResultBlock], Meta(max_length=_MAX_BLOCKS)] | None = None
    is_error: bool | None = None
    source: ImageSource | None = None


Content = str | Annotated[list[ContentBlock], Meta(max_length=_MAX_BLOCKS)]


class AnthropicMessage(Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(Struct, frozen=True):
    name: FunctionName
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: TypeName | None = None
    strict: bool | None = None


class AnthropicToolChoice(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)] | None = None


class OutputFormat(Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Struct, frozen=True):
    user_id: ShortText | None = None


class CountTokensBody(GenerationBody, kw_only=True):
    """The fields that determine the prompt."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=2048)]
    system: Content | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=128)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The beta API's name for output_config.format."""
    metadata: Metadata | None = None  # type: ignore[assignment]  # Anthropic's shape; never read
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    inference_geo: TypeName | None = None
    speed: TypeName | None = None
    """These four do not affect the answer. Prefixes are cached anyway."""
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None

    container: Raw = ABSENT
    mcp_servers: Raw = ABSENT


class MessagesBody(CountTokensBody, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None


UNSUPPORTED_FIELDS = {
    "n": (1,),
    "stop": ([],),
    "response_format": (),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "stream_options": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_timings": (False,),
    "timings_per_token": (False,),
}
"""Fields of other endpoints that this one refuses, with the values that ask for nothing."""

_messages = msgspec.json.Decoder(MessagesBody)
_count_tokens = msgspec.json.Decoder(CountTokensBody)

_Body = TypeVar("_Body", bound=CountTokensBody)


def decode_messages(data: bytes) -> MessagesBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = _checked(decode_body(_messages, data))
    thinking = body.thinking
    if thinking is not None and thinking.budget_tokens is not None and thinking.budget_tokens >= body.max_tokens:
        invalid(
            "thinking.budget_tokens",
            f"must be less than max_tokens, which is {body.max_tokens}, got {thinking.budget_tokens}",
        )
    return body


def decode_count_tokens(data: bytes) -> CountTokensBody:
    """Raises ApiError naming the field, its value and the limit."""
    return _checked(decode_body(_count_tokens, data))


def _checked(body: _Body) -> _Body:
    for field, harmless in UNSUPPORTED_FIELDS.items():
        value = getattr(body, field)
        if value is not None and value not in harmless:
            raise _unsupported(field, "not supported by this endpoint")
    if body.output_format is not None and body.output_config is not None and body.output_config.format is not None:
        invalid("output_format", "cannot be combined with output_config.format")
    if isinstance(body.system, list):
        for position, block in enumerate(body.system):
            _check_block(f"system[{position}]", block, "system")
    for position, message in enumerate(body.messages):
        if isinstance(message.content, list):
            for index, block in enumerate(message.content):
                _check_block(f"messages[{position}].content[{index}]", block, message.role)
    for position, tool in enumerate(body.tools or ()):
        path = f"tools[{position}]"
        if tool.type not in (None, "custom"):
            raise _unsupported(f"{path}.type", f'only "custom" tools are supported, got {shorten(tool.type)}')
        _required(f"{path}.input_schema", tool.input_schema)
    if body.tool_choice is not None and body.tool_choice.type == "tool":
        _required("tool_choice.name", body.tool_choice.name)
    if body.thinking is not None and body.thinking.type == "enabled":
        _required("thinking.budget_tokens", body.thinking.budget_tokens)
    return body


_KINDS = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}


def _check_block(path: str, block: ContentBlock, role: str) -> None:
    if block.type not in _KINDS[role]:
        allowed = ", ".join(_KINDS[role])
        message = f"must be one of {allowed} in content of role {role}, got {shorten(block.type)}"
        raise _unsupported(f"{path}.type", message)
    match block.type:
        case "text":
            _required(f"{path}.text", block.text)
        case "image":
            _check_source(path, block.source)
        case "thinking":
            _required(f"{path}.thinking", block.thinking)
        case "tool_use":
            _required(f"{path}.id", block.id)
            _required(f"{path}.name", block.name)
            _required(f"{path}.input", block.input)
        case "tool_result":
            _required(f"{path}.tool_use_id", block.tool_use_id)
            for position, part in enumerate(block.content if isinstance(block.content, list) else ()):
                where = f"{path}.content[{position}]"
                if part.type == "image":
                    _check_source(where, part.source)
                elif part.type == "text":
                    _required(f"{where}.text", part.text)
                else:
                    raise _unsupported(f"{where}.type", f"must be one of text, image, got {shorten(part.type)}")


_SOURCES = {"base64": ("media_type", "data"), "url": ("url",)}
"""The fields that a picture's source needs, by its type."""


def _check_source(path: str, source: ImageSource | None) -> None:
    path = f"{path}.source"
    _required(path, source)
    kind = None if source is None else source.type
    _required(f"{path}.type", kind)
    if kind not in _SOURCES:
        raise _unsupported(f"{path}.type", f"must be one of {', '.join(_SOURCES)}, got {shorten(kind)}")
    for field in _SOURCES[kind]:
        _required(f"{path}.{field}", getattr(source, field))


def _required(path: str, value: object) -> None:
    if value is None:
        raise ApiError(ErrorKind.MISSING_FIELD, f"{path}: required", param=path)


def _unsupported(path: str, message: str) -> ApiError:
    return ApiError(ErrorKind.UNSUPPORTED_FIELD, f"{path}: {message}", param=path)
