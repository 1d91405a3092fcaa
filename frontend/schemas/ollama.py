"""Ollama's request bodies, below /api."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import force_setattr

from penstock.frontend.schemas.chat import ChatTool, FunctionName
from penstock.frontend.schemas.decoding import decode_body
from penstock.frontend.schemas.generation import ABSENT, MAX_STOP_STRINGS, SchedulingBody, ShortText, StopString
from penstock.frontend.schemas.pooling.common import Dimensions, listed_inputs
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten
from penstock.shm.messages import MAX_CONTEXT_TOKENS, MAX_LOGPROBS, TokenId

_DURATION = re.compile(r"[+-]?(?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+|0")
_PART = re.compile(r"(\d+\.?\d*)(ns|us|µs|ms|s|m|h)")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MAX_OPTION = float(1 << 53)
Images: TypeAlias = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=2048)]
"""Files in base64."""
Whole = Annotated[float, Meta(ge=-_MAX_OPTION, le=_MAX_OPTION)]
"""An integer, which some clients write as 5.0."""


class OllamaOptions(Struct, frozen=True, kw_only=True):
    """Ollama's model options. Unknown ones are ignored, as there."""

    num_predict: Annotated[float, Meta(ge=-2, le=MAX_CONTEXT_TOKENS)] | None = None
    """Tokens of the answer; below 1: up to the context's end."""
    seed: Whole | None = None
    """A negative one is random."""
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_k: Annotated[float, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    typical_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    repeat_last_n: Whole | None = None
    """0: no repeat_penalty. Any other value: it looks at the whole text."""
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None

    # Accepted without effect: they say how a model is loaded, or how a full context is shifted.
    draft_num_predict: Whole | None = None
    main_gpu: Whole | None = None
    num_batch: Whole | None = None
    num_ctx: Whole | None = None
    num_gpu: Whole | None = None
    num_keep: Whole | None = None
    num_thread: Whole | None = None
    use_mmap: bool | None = None


class OllamaBody(SchedulingBody, kw_only=True):
    """Fields of every body that runs a model."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    keep_alive: float | Annotated[str, Meta(max_length=64)] | None = None
    options: OllamaOptions | None = None

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds that the model stays loaded; negative for ever. None: not given. Raises ApiError."""
        value = self.keep_alive
        if not isinstance(value, str):
            return value
        if _DURATION.fullmatch(value) is None:
            invalid("keep_alive", f'must be seconds or a duration such as "5m", got {shorten(value)}')
        total_s = sum(float(number) * _UNIT_S[unit] for number, unit in _PART.findall(value))
        return -total_s if value.startswith("-") else total_s


class GenerativeBody(OllamaBody, kw_only=True):
    """Fields of /api/chat and /api/generate."""

    stream: bool | None = None
    """True if absent."""
    format: dict[str, Any] | str | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    # Accepted without effect: a prompt that is too long is refused.
    shift: bool | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        self.stream = self.stream is not False


class OllamaFunctionCall(Struct, frozen=True):
    name: FunctionName
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    index: int | None = None


class OllamaToolCall(Struct, frozen=True):
    function: OllamaFunctionCall
    id: ShortText | None = None


class OllamaMessage(Struct, frozen=True):
    role: Annotated[str, Meta(max_length=64)]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaToolCall], Meta(max_length=256)] | None = None
    tool_name: ShortText | None = None
    tool_call_id: ShortText | None = None
    images: Images | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "role", self.role.lower())


class OllamaChatBody(GenerativeBody, kw_only=True):
    """POST /api/chat. Without messages it loads the model, or with keep_alive 0 unloads it."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=2048)] | None = None
    tools: Annotated[list[ChatTool], Meta(max_length=128)] | None = None


class OllamaGenerateBody(GenerativeBody, kw_only=True):
    """POST /api/generate. Without a prompt it loads the model, or with keep_alive 0 unloads it."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: Annotated[list[TokenId], Meta(max_length=MAX_CONTEXT_TOKENS)] | None = None
    images: Images | None = None
    template: Raw = ABSENT


class OllamaEmbedBody(OllamaBody, kw_only=True):
    """POST /api/embed."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    """True if absent."""
    dimensions: Dimensions | None = None

    def inputs(self) -> list[str]:
        """Return one text per vector. Raises ApiError."""
        if not self.input:
            return []
        return [text for text in listed_inputs("input", self.input) if isinstance(text, str)]  # type: ignore[arg-type]


class OllamaEmbeddingsBody(OllamaBody, kw_only=True):
    """POST /api/embeddings, the older form."""

    prompt: str | None = None


class OllamaModelBody(Struct, kw_only=True):
    """POST /api/show, /api/pull and DELETE /api/delete. name is the older name of model."""

    model: ShortText = ""
    name: ShortText = ""
    stream: bool | None = None


_chat = msgspec.json.Decoder(OllamaChatBody)
_generate = msgspec.json.Decoder(OllamaGenerateBody)
_embed = msgspec.json.Decoder(OllamaEmbedBody)
_embeddings = msgspec.json.Decoder(OllamaEmbeddingsBody)
_model = msgspec.json.Decoder(OllamaModelBody)
_ROLES = ("system", "user", "assistant", "tool")
_SEEN = ("user", "tool")
"""Roles that can have pictures."""


def decode_ollama_chat(data: bytes) -> OllamaChatBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = _checked(decode_body(_chat, data))
    for position, message in enumerate(body.messages or ()):
        path = f"messages[{position}]"
        if message.role not in _ROLES:
            invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}, got {shorten(message.role)}")
        if message.images and message.role not in _SEEN:
            invalid(f"{path}.images", f"only allowed in messages of role {' and '.join(_SEEN)}")
    return body


def decode_ollama_generate(data: bytes) -> OllamaGenerateBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = _checked(decode_body(_generate, data))
    if (body.raw or body.suffix) and (body.system or body.context):
        invalid("system" if body.system else "context", f"cannot be combined with {'raw' if body.raw else 'suffix'}")
    if body.raw and body.suffix:
        invalid("suffix", "cannot be combined with raw")
    if body.images and (body.raw or body.suffix):
        invalid("images", f"cannot be combined with {'raw' if body.raw else 'suffix'}: the template shows pictures")
    return body


def decode_ollama_embed(data: bytes) -> OllamaEmbedBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = decode_body(_embed, data)
    body.inputs()
    return body


def decode_ollama_embeddings(data: bytes) -> OllamaEmbeddingsBody:
    """Raises ApiError naming the field, its value and the limit."""
    return decode_body(_embeddings, data)


def decode_ollama_model(data: bytes) -> OllamaModelBody:
    """Raises ApiError naming the field."""
    body = decode_body(_model, data)
    body.model = body.model or body.name
    if not body.model:
        raise ApiError(ErrorKind.MISSING_FIELD, "model: required", param="model")
    return body


_Generative = TypeVar("_Generative", bound=GenerativeBody)


def _checked(body: _Generative) -> _Generative:
    if isinstance(body.format, str) and body.format not in ("", "json"):
        invalid("format", f'must be "json" or a JSON schema, got {shorten(body.format)}')
    if body.top_logprobs and not body.logprobs:
        invalid("top_logprobs", "needs logprobs to be true")
    return body
