"""The bodies of the generation endpoints. Decoding is validation: every bound is in a type.

Fields that would change the answer and that this server does not have are declared too, so that they are refused by
name instead of ignored. Any other unknown field is ignored, as OpenAI clients expect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from frontend.errors import ApiError, ErrorKind, invalid, shorten
from frontend.terms import MAX_TIMEOUT_MS
from shm.wire import MAX_CONTEXT_TOKENS

MAX_CHOICES = 128
"""Prompts × n of one request."""

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
Role = Literal["system", "developer", "user", "assistant", "tool"]
_ABSENT = Raw(b"")


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class GenerationBody(Struct, kw_only=True):
    """What both endpoints understand. None everywhere means: not given."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=32)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=300)] | None = (
        None
    )
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    timeout_ms: Annotated[int, Meta(ge=1, le=MAX_TIMEOUT_MS)] | None = None

    # Not offered: each is refused unless it asks for nothing.
    allowed_token_ids: Raw = _ABSENT
    bad_words: Raw = _ABSENT
    best_of: Raw = _ABSENT
    echo: Raw = _ABSENT
    grammar: Raw = _ABSENT
    guided_choice: Raw = _ABSENT
    guided_grammar: Raw = _ABSENT
    guided_json: Raw = _ABSENT
    guided_regex: Raw = _ABSENT
    include_stop_str_in_output: Raw = _ABSENT
    json_schema: Raw = _ABSENT
    logprobs: Raw = _ABSENT
    min_tokens: Raw = _ABSENT
    mirostat: Raw = _ABSENT
    prompt_embeds: Raw = _ABSENT
    prompt_logprobs: Raw = _ABSENT
    response_format: Raw = _ABSENT
    structured_outputs: Raw = _ABSENT
    suffix: Raw = _ABSENT
    top_logprobs: Raw = _ABSENT
    truncate_prompt_tokens: Raw = _ABSENT
    typical_p: Raw = _ABSENT
    use_beam_search: Raw = _ABSENT

    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions. prompt: one text, several, one list of token ids, or several."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]

    def has_several_prompts(self) -> bool:
        return isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt. Raises ApiError for a mixed list, an empty one, or too many."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        first = type(self.prompt[0])
        for position, item in enumerate(self.prompt):
            if type(item) is not first:
                invalid(f"prompt[{position}]", "a prompt list holds texts, token ids or lists of token ids, not a mix")
            if isinstance(item, list) and not item:
                invalid(f"prompt[{position}]", "an empty list of token ids")
        prompts: list[Any] = [self.prompt] if first is int else self.prompt
        if len(prompts) > MAX_CHOICES:
            invalid("prompt", f"at most {MAX_CHOICES} prompts in one request, got {len(prompts)}")
        return prompts


class ContentPart(Struct, frozen=True):
    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None


class ChatMessage(Struct, frozen=True):
    role: Role
    content: str | Annotated[list[ContentPart], Meta(max_length=2048)] | None = None
    name: Annotated[str, Meta(max_length=512)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=512)] | None = None
    tool_calls: Raw = _ABSENT
    function_call: Raw = _ABSENT


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=2048)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)] | None = None

    add_generation_prompt: Raw = _ABSENT
    audio: Raw = _ABSENT
    chat_template: Raw = _ABSENT
    chat_template_kwargs: Raw = _ABSENT
    continue_final_message: Raw = _ABSENT
    documents: Raw = _ABSENT
    function_call: Raw = _ABSENT
    functions: Raw = _ABSENT
    modalities: Raw = _ABSENT
    reasoning_effort: Raw = _ABSENT
    tool_choice: Raw = _ABSENT
    tools: Raw = _ABSENT
    web_search_options: Raw = _ABSENT


_TRUE_BY_DEFAULT = frozenset({"add_generation_prompt"})
_ASKS_FOR_NOTHING = frozenset({b"", b"null", b"false", b"[]", b"{}", b'""'})
# Values that ask for what happens anyway.
_DEFAULTS: dict[str, frozenset[object]] = {
    "add_generation_prompt": frozenset({True}),
    "best_of": frozenset({1}),
    "function_call": frozenset({"none"}),
    "min_tokens": frozenset({0}),
    "mirostat": frozenset({0}),
    "response_format": frozenset({("type", "text")}),
    "tool_choice": frozenset({"none", "auto"}),
    "top_logprobs": frozenset({0}),
    "typical_p": frozenset({1}),
    "modalities": frozenset({"text"}),
}

_completion = msgspec.json.Decoder(CompletionBody)
_chat = msgspec.json.Decoder(ChatBody)
_any = msgspec.json.Decoder()

Body = TypeVar("Body", bound=GenerationBody)


def decode_completion(data: bytes) -> CompletionBody:
    """Raises ApiError naming the field, its value and the limit."""
    return _decode(_completion, data)


def decode_chat(data: bytes) -> ChatBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = _decode(_chat, data)
    for position, message in enumerate(body.messages):
        _check_message(f"messages[{position}]", message)
    return body


def _decode(decoder: msgspec.json.Decoder[Body], data: bytes) -> Body:
    # The codec raises these four for hostile bytes.
    try:
        body = decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _explain(str(error), data) from None
    except msgspec.DecodeError as error:
        raise ApiError(ErrorKind.INVALID_JSON, f"the body is not JSON: {error}") from None
    except UnicodeDecodeError:
        raise ApiError(ErrorKind.INVALID_JSON, "the body is not valid UTF-8") from None
    except RecursionError:
        raise ApiError(ErrorKind.INVALID_JSON, "the body is nested too deeply") from None
    _refuse_unsupported(body)
    if body.stream_options is not None and not body.stream:
        invalid("stream_options", "only allowed when stream is true")
    if body.n is not None and body.n > 1 and isinstance(body, CompletionBody):
        num_choices = body.n * len(body.prompts())
        if num_choices > MAX_CHOICES:
            invalid("n", f"at most {MAX_CHOICES} choices in one request (prompts × n), got {num_choices}")
    return body


def _refuse_unsupported(body: GenerationBody) -> None:
    for field in _RAW_FIELDS[type(body)]:
        raw = bytes(getattr(body, field))
        asks_for_nothing = raw in _ASKS_FOR_NOTHING and not (raw == b"false" and field in _TRUE_BY_DEFAULT)
        if asks_for_nothing or _is_default(field, raw):
            continue
        raise ApiError(ErrorKind.UNSUPPORTED_FIELD, f"{field}: not supported by this server", param=field)


def _raw_fields(struct: type[Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(struct) if field.type is Raw)


_RAW_FIELDS: dict[type[GenerationBody], tuple[str, ...]] = {
    struct: _raw_fields(struct) for struct in (CompletionBody, ChatBody)
}


def _is_default(field: str, raw: bytes) -> bool:
    defaults = _DEFAULTS.get(field)
    if defaults is None or len(raw) > 64:
        return False
    value = _any.decode(raw)
    if isinstance(value, dict) and len(value) == 1:
        value = next(iter(value.items()))
    elif isinstance(value, list) and len(value) == 1:
        value = value[0]
    return isinstance(value, str | int | float | tuple) and _is_flat(value) and value in defaults


def _is_flat(value: str | float | tuple[object, ...]) -> bool:
    return not isinstance(value, tuple) or all(isinstance(item, str) for item in value)


def _check_message(path: str, message: ChatMessage) -> None:
    for field in ("tool_calls", "function_call"):
        if bytes(getattr(message, field)) not in _ASKS_FOR_NOTHING:
            raise ApiError(
                ErrorKind.UNSUPPORTED_FIELD, f"{path}.{field}: not supported by this server", param=f"{path}.{field}"
            )
    if message.content is None and message.role != "assistant":
        invalid(f"{path}.content", f"a message of role {message.role} needs a content")
    if isinstance(message.content, list):
        for position, part in enumerate(message.content):
            where = f"{path}.content[{position}]"
            if part.type != "text":
                invalid(f"{where}.type", f'only "text" parts are supported, got {shorten(part.type)}')
            if part.text is None:
                invalid(f"{where}.text", "missing")


def _explain(message: str, data: bytes) -> ApiError:
    """The codec's own words, such as "Expected `int` <= 16 - at `$.n`", as an error that names field and value."""
    expected, _, place = message.replace("`", "").rpartition(" - at ")
    expected, place = (expected, place) if expected else (place, "$")
    if expected.startswith("Object missing required field "):
        field = expected.rpartition(" ")[2]
        path = f"{place[2:]}.{field}" if place != "$" else field
        return ApiError(ErrorKind.MISSING_FIELD, f"{path}: required", param=path)
    of_key = place.startswith("key in ")
    path = place.removeprefix("key in ").removeprefix("$").removeprefix(".")
    expected = f"{expected[:1].lower()}{expected[1:]}"
    if not path:
        return ApiError(ErrorKind.INVALID_VALUE, f"the body must be a JSON object: {expected}")
    if of_key:
        expected = f"a key is wrong: {expected}"
    elif (value := _value_at(path, data)) is not None and not expected.endswith(f", got {value}"):
        expected = f"{expected}, got {value}" if ", got " not in expected else f"{expected} {value}"
    return ApiError(ErrorKind.INVALID_VALUE, f"{path}: {expected}", param=path)


def _value_at(path: str, data: bytes) -> str | None:
    """The value at a path such as messages[0].role, shortened; None where it cannot be said."""
    try:
        value = _any.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for step in path.replace("[", ".[").split("."):
        if step.startswith("["):
            index = step[1:-1]
            if not index.isdecimal() or not isinstance(value, list) or int(index) >= len(value):
                return None
            value = value[int(index)]
        elif isinstance(value, dict) and step in value:
            value = value[step]
        else:
            return None
    return shorten(value)
