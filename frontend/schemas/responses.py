"""POST /v1/responses. `penstock.frontend.endpoints.responses.items` turns it into a chat request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.frontend.schemas.chat import FunctionName
from penstock.frontend.schemas.decoding import decode_body
from penstock.frontend.schemas.generation import ABSENT, GenerationBody, ShortText, TypeName
from penstock.frontend.schemas.response_tools import (
    MAX_TOOLS,
    NamedToolChoice,
    ResponseTool,
    check_tools,
    required,
)
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten
from penstock.shm.messages import MAX_CONTEXT_TOKENS, MAX_LOGPROBS

MAX_ITEMS = 2048
SUMMARY_MARK = "penstock-summary:"
"""The beginning of our compaction items' content. OpenAI's items are encrypted, and useless to any other server."""
ItemRole = Literal["system", "developer", "user", "assistant"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


class ItemPart(Struct, frozen=True):
    """A part of an item's content. The text of a refusal is in `refusal`."""

    type: TypeName
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: TypeName | None = None

    @property
    def text_or_refusal(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""

    @property
    def is_picture(self) -> bool:
        return self.type == "input_image"


Parts = Annotated[list[ItemPart], Meta(max_length=MAX_ITEMS)]


class ResponseItem(Struct, frozen=True):
    """An item of the input. Which fields are required depends on the type."""

    type: TypeName | None = None
    id: ShortText | None = None
    role: ItemRole | None = None
    content: str | Parts | None = None
    call_id: ShortText | None = None
    name: FunctionName | None = None
    namespace: FunctionName | None = None
    arguments: str | None = None
    input: str | None = None
    encrypted_content: str | None = None
    """The summary of a compaction. Reasoning of this server has none."""
    output: str | Parts | None = None
    summary: Parts | None = None

    @property
    def kind(self) -> str:
        return self.type or "message"


class TextFormat(Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    description: Annotated[str, Meta(max_length=65536)] | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Struct, frozen=True):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(GenerationBody, kw_only=True):
    """A request for a response. input may be omitted with previous_response_id."""

    input: str | Annotated[list[ResponseItem], Meta(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: ShortText | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[TypeName], Meta(max_length=16)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    """Limits calls of built-in tools; this server has none."""
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: TypeName | None = None
    """These two tell OpenAI how long to keep prefixes. Accepted without effect."""
    enable_thinking: bool | None = None
    thinking_budget: Annotated[int, Meta(ge=0, le=MAX_CONTEXT_TOKENS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None

    conversation: Raw = ABSENT
    context_management: Raw = ABSENT
    moderation: Raw = ABSENT
    prompt: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT
    max_tokens: Raw = ABSENT
    messages: Raw = ABSENT

    @property
    def requests_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""The second is for servers that hide reasoning from clients; here reasoning is returned as text."""

UNSUPPORTED_FIELDS = {
    "n": (1,),
    "response_format": (),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_timings": (False,),
    "timings_per_token": (False,),
}
"""Fields of other endpoints that this one refuses, with the values that ask for nothing."""

_decoder = msgspec.json.Decoder(ResponsesBody)


def decode_responses(data: bytes) -> ResponsesBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = decode_body(_decoder, data)
    _check(body)
    return body


def _check(body: ResponsesBody) -> None:
    for field, harmless in UNSUPPORTED_FIELDS.items():
        value = getattr(body, field)
        if value is not None and value not in harmless:
            raise ApiError(
                ErrorKind.UNSUPPORTED_FIELD,
                f"{field}: not supported by this endpoint, got {_shown(value)}",
                param=field,
            )
    if body.input is None and body.previous_response_id is None:
        raise ApiError(ErrorKind.MISSING_FIELD, "input: required", param="input")
    if isinstance(body.input, list):
        check_items(body.input)
    for position, name in enumerate(body.include or ()):
        if name not in _INCLUDABLE:
            invalid(f"include[{position}]", f"must be one of {', '.join(_INCLUDABLE)}, got {shorten(name)}")
    if body.stream_options is not None and not body.stream:
        invalid("stream_options", "only allowed when stream is true")
    if body.background and body.store is False:
        invalid("background", "needs store to be true: the answer can only be fetched from the store")
    form = None if body.text is None else body.text.format
    if form is not None and form.type == "json_schema" and form.schema is None:
        raise ApiError(ErrorKind.MISSING_FIELD, "text.format.schema: required", param="text.format.schema")
    check_tools(body.tools, body.tool_choice)


def _shown(value: object) -> str:
    return shorten(value) if isinstance(value, int | bool | list) else "an object"


def check_items(items: list[ResponseItem]) -> None:
    """Check that each item has the fields that its type requires. Raises ApiError."""
    for position, item in enumerate(items):
        path = f"input[{position}]"
        match item.kind:
            case "message":
                required(f"{path}.role", item.role)
                required(f"{path}.content", item.content)
                _check_parts(f"{path}.content", item.content, takes_pictures=item.role == "user")
            case "function_call":
                required(f"{path}.call_id", item.call_id)
                required(f"{path}.name", item.name)
                required(f"{path}.arguments", item.arguments)
            case "custom_tool_call":
                required(f"{path}.call_id", item.call_id)
                required(f"{path}.name", item.name)
                required(f"{path}.input", item.input)
            case "function_call_output" | "custom_tool_call_output":
                required(f"{path}.call_id", item.call_id)
                required(f"{path}.output", item.output)
                _check_parts(f"{path}.output", item.output, takes_pictures=True)
            case "reasoning":
                _check_parts(f"{path}.content", item.content)
                _check_parts(f"{path}.summary", item.summary)
            case "compaction":
                required(f"{path}.encrypted_content", item.encrypted_content)
                if not (item.encrypted_content or "").startswith(SUMMARY_MARK):
                    invalid(f"{path}.encrypted_content", "not made by this server; send the conversation instead")
            case "item_reference":
                required(f"{path}.id", item.id)
            case other:
                message = f"{path}.type: items of type {shorten(other)} are not supported by this server"
                raise ApiError(ErrorKind.UNSUPPORTED_FIELD, message, param=f"{path}.type")


def _check_parts(path: str, content: str | list[ItemPart] | None, *, takes_pictures: bool = False) -> None:
    for position, part in enumerate(content if isinstance(content, list) else ()):
        where = f"{path}[{position}]"
        if part.is_picture and takes_pictures:
            if not part.image_url:
                message = f"{where}.image_url: required; there are no uploaded files here"
                raise ApiError(ErrorKind.MISSING_FIELD, message, param=f"{where}.image_url")
        elif part.type not in _TEXT_PARTS:
            message = f"{where}.type: parts of this type are not supported here, got {shorten(part.type)}"
            raise ApiError(ErrorKind.UNSUPPORTED_FIELD, message, param=f"{where}.type")
        elif part.type == "refusal":
            required(f"{where}.refusal", part.refusal)
        else:
            required(f"{where}.text", part.text)
