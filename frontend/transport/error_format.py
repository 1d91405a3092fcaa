"""The JSON of an error: OpenAI's format, or Anthropic's on its own endpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.transport.errors import ErrorKind, error_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.frontend.transport.errors import ApiError

ANTHROPIC_PATH = "/v1/messages"

_OVERLOADED = (529, "overloaded_error")
_ANTHROPIC = {
    ErrorKind.BAD_KEY: (401, "authentication_error"),
    ErrorKind.BODY_TOO_LARGE: (413, "request_too_large"),
    ErrorKind.TOO_SLOW: (408, "timeout_error"),
    ErrorKind.EXPIRED: (499, "timeout_error"),
    # The queue is full for everybody. A key that exceeds its own limit gets 429, as at Anthropic.
    ErrorKind.OVERLOADED: _OVERLOADED,
}
_ANTHROPIC_TYPES = {403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    describe: Callable[[ApiError, str], tuple[int, bytes]]
    """Takes the error and the request id; returns the status and the body."""
    request_id_headers: tuple[bytes, ...]
    """Headers of every answer that carry the request id."""


def anthropic_error(error: ApiError, request_id: str) -> tuple[int, bytes]:
    """Return the status and Anthropic's error object."""
    status, error_type = _ANTHROPIC.get(error.kind) or (error.kind.status, _anthropic_type(error.kind.status))
    body = {"type": "error", "error": {"type": error_type, "message": error.message}, "request_id": request_id}
    return status, msgspec.json.encode(body)


def _anthropic_type(status: int) -> str:
    return _ANTHROPIC_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")


def _openai_error(error: ApiError, request_id: str) -> tuple[int, bytes]:  # noqa: ARG001 - OpenAI has it in a header only
    return error.kind.status, error_body(error)


_OPENAI_FORMAT = ErrorFormat(_openai_error, (b"x-request-id",))
_ANTHROPIC_FORMAT = ErrorFormat(anthropic_error, (b"x-request-id", b"request-id"))


def error_format_for(path: str) -> ErrorFormat:
    """Return the format for a path, whether an endpoint has it or not."""
    is_anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
    return _ANTHROPIC_FORMAT if is_anthropic else _OPENAI_FORMAT
