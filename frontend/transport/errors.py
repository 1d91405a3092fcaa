"""Every error that a client can see: its kind, its status, and its JSON in the format of the API that it calls.

A message names the field, the value, the limit and what to do. The text of an exception never reaches a client.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    type: str
    code: str


class ErrorKind(enum.Enum):
    """The kind of an error, with its HTTP status and the error object's type and code."""

    INVALID_JSON = _Answer(400, "invalid_request_error", "invalid_json")
    INVALID_VALUE = _Answer(400, "invalid_request_error", "invalid_value")
    EMPTY_VALUE = _Answer(400, "invalid_request_error", "empty_value")
    MISSING_FIELD = _Answer(400, "invalid_request_error", "missing_required_parameter")
    UNSUPPORTED_FIELD = _Answer(400, "invalid_request_error", "unsupported_parameter")
    CONTEXT_TOO_LONG = _Answer(400, "invalid_request_error", "context_length_exceeded")
    TOO_MANY_INPUTS = _Answer(400, "invalid_request_error", "too_many_inputs")
    TEMPLATE_REFUSED = _Answer(400, "invalid_request_error", "chat_template_error")
    WRONG_MODEL = _Answer(400, "invalid_request_error", "model_not_capable")
    BAD_HTTP = _Answer(400, "invalid_request_error", "bad_http")
    UNKNOWN_PREVIOUS = _Answer(400, "invalid_request_error", "previous_response_not_found")
    BAD_KEY = _Answer(401, "authentication_error", "invalid_api_key")
    NO_ADMIN = _Answer(403, "permission_error", "admin_key_required")
    FOREIGN_HOST = _Answer(403, "permission_error", "host_not_allowed")
    FOREIGN_ORIGIN = _Answer(403, "permission_error", "origin_not_allowed")
    UNKNOWN_PATH = _Answer(404, "invalid_request_error", "unknown_url")
    UNKNOWN_MODEL = _Answer(404, "invalid_request_error", "model_not_found")
    UNKNOWN_REQUEST = _Answer(404, "invalid_request_error", "request_not_found")
    UNKNOWN_RESPONSE = _Answer(404, "invalid_request_error", "response_not_found")
    UNKNOWN_STREAM = _Answer(404, "invalid_request_error", "stream_not_found")
    WRONG_METHOD = _Answer(405, "invalid_request_error", "method_not_allowed")
    TOO_SLOW = _Answer(408, "invalid_request_error", "request_timeout")
    MODEL_IN_USE = _Answer(409, "invalid_request_error", "model_in_use")
    TAKEN_OVER = _Answer(409, "invalid_request_error", "stream_taken_over")
    BODY_TOO_LARGE = _Answer(413, "invalid_request_error", "request_too_large")
    UNSUPPORTED_BODY = _Answer(415, "invalid_request_error", "unsupported_media_type")
    OVERLOADED = _Answer(429, "rate_limit_error", "overloaded")
    RATE_LIMITED = _Answer(429, "rate_limit_error", "rate_limit_exceeded")
    TOO_LATE = _Answer(429, "rate_limit_error", "deadline_not_met")
    HEADERS_TOO_LARGE = _Answer(431, "invalid_request_error", "headers_too_large")
    EXPIRED = _Answer(499, "timeout_error", "timeout")
    CANCELLED = _Answer(499, "cancelled_error", "cancelled_by_operator")
    INTERNAL = _Answer(500, "server_error", "internal_error")
    UNAVAILABLE = _Answer(503, "server_error", "backend_unavailable")
    SHUTTING_DOWN = _Answer(503, "server_error", "shutting_down")

    @property
    def status(self) -> int:
        return self.value.status


class ApiError(Exception):
    """Ends a request with this error. headers are added to content-type and content-length."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        """numbers are further fields of OpenAI's error object."""
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.headers = headers
        self.numbers = numbers or {}


def empty_text(param: str) -> NoReturn:
    """Raise the ApiError for a field with an empty text."""
    raise ApiError(ErrorKind.EMPTY_VALUE, f"{param}: an empty text", param=param)


def invalid(param: str, message: str) -> NoReturn:
    """Raise the ApiError for a field with an invalid value."""
    raise ApiError(ErrorKind.INVALID_VALUE, f"{param}: {message}", param=param)


def retry_later(kind: ErrorKind, message: str, retry_after_s: int) -> ApiError:
    """Return an ApiError that says when to retry."""
    return ApiError(kind, message, headers=((b"retry-after", b"%d" % max(1, retry_after_s)),))


def shutting_down() -> ApiError:
    return retry_later(ErrorKind.SHUTTING_DOWN, "the server is shutting down; retry later", 1)


_SHOWN_CHARACTERS = 60


def shorten(value: object) -> str:
    """Return a client's value as JSON for an error message, at most 60 characters of it."""
    # Cut before encoding: the value may be as large as a body, and the encoder has a depth limit of its own.
    if isinstance(value, str):
        text = msgspec.json.encode(value[: _SHOWN_CHARACTERS + 1]).decode()
    elif isinstance(value, list):
        return f"an array of {len(value)}"
    elif isinstance(value, dict):
        return f"an object of {len(value)}"
    else:
        text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


# Formats

ANTHROPIC_PATH = "/v1/messages"

_OVERLOADED = (529, "overloaded_error")
_ANTHROPIC = {
    ErrorKind.BAD_KEY: (401, "authentication_error"),
    ErrorKind.BODY_TOO_LARGE: (413, "request_too_large"),
    ErrorKind.TOO_SLOW: (408, "timeout_error"),
    ErrorKind.EXPIRED: (499, "timeout_error"),
    ErrorKind.CANCELLED: (499, "timeout_error"),  # Anthropic has no type for it
    # The queue is full for everybody. A key that exceeds its own limit gets 429, as at Anthropic.
    ErrorKind.OVERLOADED: _OVERLOADED,
}
_ANTHROPIC_TYPES = {403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How an API writes a stream. head and tail are around each event's JSON."""

    content_type: bytes
    head: bytes
    tail: bytes
    keep_alive: bytes
    """Sent while nothing else is; empty if the API has no such event."""


SERVER_SENT = StreamForm(b"text/event-stream; charset=utf-8", b"data: ", b"\n\n", b": keep-alive\n\n")
JSON_LINES = StreamForm(b"application/x-ndjson", b"", b"\n", b"")


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    describe: Callable[[ApiError, str], tuple[int, bytes]]
    """Takes the error and the request id; returns the status and the body."""
    request_id_headers: tuple[bytes, ...] = (b"x-request-id",)
    """Headers of every answer that carry the request id."""
    event_name: bytes = b""
    """The line that names an error event, if it has a name."""
    stream: StreamForm = SERVER_SENT


def error_body(error: ApiError) -> bytes:
    """Return OpenAI's error object."""
    answer = error.kind.value
    fields = {"message": error.message, "type": answer.type, "param": error.param, "code": answer.code}
    return msgspec.json.encode({"error": fields | dict(error.numbers)})


def anthropic_error(error: ApiError, request_id: str) -> tuple[int, bytes]:
    """Return the status and Anthropic's error object."""
    status, error_type = _ANTHROPIC.get(error.kind) or (error.kind.status, _anthropic_type(error.kind.status))
    body = {"type": "error", "error": {"type": error_type, "message": error.message}, "request_id": request_id}
    return status, msgspec.json.encode(body)


def _anthropic_type(status: int) -> str:
    return _ANTHROPIC_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")


def _openai_error(error: ApiError, request_id: str) -> tuple[int, bytes]:  # noqa: ARG001 - OpenAI has it in a header only
    return error.kind.status, error_body(error)


def _cohere_error(error: ApiError, request_id: str) -> tuple[int, bytes]:
    """Cohere's error is a message, Jina's a detail; vLLM, whose path it is too, has OpenAI's object."""
    openai = msgspec.Raw(error_body(error)[len(b'{"error":') : -1])
    body = {"id": request_id, "message": error.message, "detail": error.message, "error": openai}
    return error.kind.status, msgspec.json.encode(body)


_TEI_STATUSES = {
    ErrorKind.CONTEXT_TOO_LONG: 413,
    ErrorKind.TOO_MANY_INPUTS: 413,
    ErrorKind.MISSING_FIELD: 422,
    ErrorKind.INVALID_VALUE: 422,
    ErrorKind.UNSUPPORTED_FIELD: 422,
    ErrorKind.WRONG_MODEL: 424,
    ErrorKind.INTERNAL: 424,
}
_TEI_TYPES = {424: "Backend", 429: "Overloaded", 499: "Backend", 503: "Unhealthy"}
TEI_STATUSES = tuple(sorted(set(_TEI_STATUSES.values())))
"""Statuses that TEI's endpoints have beside those of `ErrorKind`."""


def _tei_error(error: ApiError, request_id: str) -> tuple[int, bytes]:  # noqa: ARG001 - TEI has none
    """Return the status and the error of text-embeddings-inference."""
    status = _TEI_STATUSES.get(error.kind, error.kind.status)
    error_type = "Empty" if error.kind is ErrorKind.EMPTY_VALUE else _TEI_TYPES.get(status, "Validation")
    return status, msgspec.json.encode({"error": error.message, "error_type": error_type})


def _ollama_error(error: ApiError, request_id: str) -> tuple[int, bytes]:  # noqa: ARG001 - Ollama has none
    return error.kind.status, msgspec.json.encode({"error": error.message})


_LLAMA_CPP_TYPES = {ErrorKind.CONTEXT_TOO_LONG: "exceed_context_size_error", ErrorKind.UNAVAILABLE: "unavailable_error"}


def llama_cpp_error(error: ApiError, request_id: str) -> tuple[int, bytes]:  # noqa: ARG001 - llama.cpp has none
    """Return the status and the error of llama.cpp's server, whose code is the status."""
    status, kind = error.kind.status, _LLAMA_CPP_TYPES.get(error.kind, error.kind.value.type)
    fields = {"code": status, "message": error.message, "type": kind}
    return status, msgspec.json.encode({"error": fields | dict(error.numbers)})


_OPENAI_FORMAT = ErrorFormat(_openai_error)
_COHERE_FORMAT = ErrorFormat(_cohere_error)
TEI_FORMAT = ErrorFormat(_tei_error)
_OLLAMA_FORMAT = ErrorFormat(_ollama_error, stream=JSON_LINES)
_LLAMA_CPP_FORMAT = ErrorFormat(llama_cpp_error)
LLAMA_CPP_PATHS = ("/completion", "/infill", "/props", "/slots", "/lora-adapters")
COHERE_PATHS = ("/v1/embed", "/v2/embed", "/v1/rerank", "/v2/rerank", "/rerank")
_TEI_PATHS = ("/", "/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/decode", "/info")
_BY_PATH = dict.fromkeys(COHERE_PATHS, _COHERE_FORMAT) | dict.fromkeys(LLAMA_CPP_PATHS, _LLAMA_CPP_FORMAT)
_ANTHROPIC_FORMAT = ErrorFormat(anthropic_error, (b"x-request-id", b"request-id"), b"event: error\n")


def is_of_tei(path: str, method: str) -> bool:
    """Whether an endpoint belongs to TEI's API alone. At / that is POST; the chat page uses the other methods."""
    return path in _TEI_PATHS and (path != "/" or method == "POST")


def is_of_ollama(path: str) -> bool:
    """Whether a path is Ollama's. Other servers have OpenAI's endpoints below /api/v1."""
    return path.startswith("/api/") and not path.startswith("/api/v1/")


def error_format_for(path: str, method: str) -> ErrorFormat:
    """Return the format for a path, whether an endpoint has it or not."""
    if is_of_tei(path, method):
        return TEI_FORMAT
    if is_of_ollama(path):
        return _OLLAMA_FORMAT
    is_anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
    return _ANTHROPIC_FORMAT if is_anthropic else _BY_PATH.get(path, _OPENAI_FORMAT)
