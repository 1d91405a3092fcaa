"""Turns failures of the backend into errors of the API."""

from __future__ import annotations

import math
import re

import msgspec

from penstock.frontend.transport.errors import ApiError, ErrorKind, retry_later, shutting_down
from penstock.shm.client import PooledFailed, TokenBatch, TokenStream
from penstock.shm.messages import FailureCode, Finish

_SCHEMA_RULE = re.compile(r"(answer|tool_(?P<tool>\d+)_\w+): ")
_SHOWN_CHARACTERS = 200
"""Characters of the grammar compiler's message that the error shows."""


def overloaded(retry_after_s: int, limit: int) -> ApiError:
    """Return the error of a request for which there is no place. limit is the number of places, all taken."""
    return retry_later(ErrorKind.OVERLOADED, f"too many requests are waiting: the limit is {limit}", retry_after_s)


def expired() -> ApiError:
    return ApiError(ErrorKind.EXPIRED, "the request's time limit has passed")


def backend_unavailable(retry_after_s: int) -> ApiError:
    return retry_later(ErrorKind.UNAVAILABLE, "the model is not available at the moment", retry_after_s)


def stream_failure(batch: TokenBatch, num_tokens: int, grammar_field: str | None, retry_after_s: int) -> ApiError:
    """Return the error of a stream that ended with this batch, REJECTED, FAILED or EXPIRED.

    num_tokens were generated; grammar_field is the body's field that asks for a grammar; retry_after_s is for failures
    without a time of their own.
    """
    if batch.finish is Finish.EXPIRED:
        return ApiError(ErrorKind.EXPIRED, f"the request's time limit has passed, after {num_tokens} tokens")
    match batch.failure:
        case FailureCode.OVERLOADED if batch.failure_text:
            return retry_later(ErrorKind.OVERLOADED, batch.failure_text, batch.retry_after_s or retry_after_s)
        case FailureCode.OVERLOADED:
            return overloaded(batch.retry_after_s or retry_after_s, batch.failure_limit)
        case FailureCode.CONTEXT_TOO_LONG:
            message = f"prompt and max_tokens together do not fit: the limit is {batch.failure_limit} tokens"
            return ApiError(ErrorKind.CONTEXT_TOO_LONG, message, param="max_tokens")
        case FailureCode.BAD_TOKEN:
            message = f"a token id is outside the vocabulary of {batch.failure_limit}"
            return ApiError(ErrorKind.INVALID_VALUE, message)
        case FailureCode.BAD_GRAMMAR:
            return _bad_grammar(batch.failure_text, grammar_field)
        case FailureCode.NOT_SCORED:
            message = "prompt_logprobs, and echo with logprobs: this model's forward pass does not score prompts"
            return ApiError(ErrorKind.INVALID_VALUE, message)
        case FailureCode.NOT_SAMPLED:
            message = f"{batch.failure_text}: this model's forward pass samples without it; passes on the CPU know it"
            return ApiError(ErrorKind.UNSUPPORTED_FIELD, message, param=batch.failure_text)
        case FailureCode.NOT_SERVED:
            return ApiError(ErrorKind.WRONG_MODEL, "model: it cannot do what the request asks for", param="model")
        case FailureCode.BAD_ADAPTER:
            return ApiError(ErrorKind.INVALID_VALUE, batch.failure_text, param=batch.failure_text.partition(":")[0])
        case FailureCode.BAD_PICTURE:
            return ApiError(ErrorKind.INVALID_VALUE, f"messages: {batch.failure_text}", param="messages")
        case FailureCode.NO_ADAPTER:
            message = f"model: this adapter is not loaded any more; {num_tokens} tokens were generated with it"
            return ApiError(ErrorKind.UNKNOWN_MODEL, message, param="model")
        case FailureCode.SHUTTING_DOWN:
            return shutting_down()
        case FailureCode.CANCELLED:
            message = f"the server's operator cancelled this request, after {num_tokens} tokens"
            return ApiError(ErrorKind.CANCELLED, message)
        case FailureCode.TAKEN_OVER:
            return ApiError(ErrorKind.TAKEN_OVER, "another connection reads this stream now, or has deleted it")
        case FailureCode.UNAVAILABLE if batch.failure_text:
            return retry_later(ErrorKind.UNAVAILABLE, batch.failure_text, retry_after_s)
        case FailureCode.UNAVAILABLE:
            return backend_unavailable(retry_after_s)
        case _:
            return ApiError(ErrorKind.INTERNAL, "an internal error ended the answer")


def _bad_grammar(text: str, field: str | None) -> ApiError:
    """Return the error of a grammar that does not compile. text begins with the rule of a schema that is at fault."""
    if (rule := _SCHEMA_RULE.match(text)) is not None:
        field = field if rule["tool"] is None else f"tools[{rule['tool']}].function.parameters"
        text = text[rule.end() :]
    reason = msgspec.json.encode(text[:_SHOWN_CHARACTERS]).decode()
    message = f"{'' if field is None else f'{field}: '}the grammar cannot be used: {reason}"
    return ApiError(ErrorKind.INVALID_VALUE, message, param=field)


def too_late(stream: TokenStream, retry_after_s: int) -> ApiError:
    """Return the error of a request that was refused because it would finish after its deadline."""
    quote, deadline_s = stream.quote, stream.deadline_s
    if quote is None or quote.finish_s is None or deadline_s is None:
        return ApiError(ErrorKind.INTERNAL, "the backend gave no quote")
    limit_ms = max(0, round(1000 * deadline_s - stream.submitted_ns / 1e6))
    numbers = {
        "queue_position": quote.num_ahead,
        "expected_ttft_ms": milliseconds(quote.first_token_s) or 0,
        "expected_finish_ms": milliseconds(quote.finish_s) or 0,
        "latest_finish_ms": milliseconds(quote.latest_finish_s) or 0,
        "left_ms": limit_ms,
    }
    message = (
        f"timeout_ms: {limit_ms} ms are left, but the request is expected to finish in {numbers['expected_finish_ms']} "
        f"ms; {quote.num_ahead} others wait before it"
    )
    headers = ((b"retry-after", b"%d" % max(1, retry_after_s)),)
    return ApiError(ErrorKind.TOO_LATE, message, param="timeout_ms", headers=headers, numbers=numbers)


def milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else math.ceil(1000 * seconds)


def pooled_failure(failed: PooledFailed, field: str, retry_after_s: int) -> ApiError:
    """Return the error of a request whose inputs were not computed and which was not cancelled.

    field is the body's name of the inputs.
    """
    if failed.finish is Finish.EXPIRED:
        return expired()
    if failed.failure is FailureCode.CONTEXT_TOO_LONG:
        message = f"{field}: an input is longer than the limit of {failed.limit} tokens"
        return ApiError(ErrorKind.CONTEXT_TOO_LONG, message, param=field)
    batch = TokenBatch([], failed.finish, failed.failure, failed.limit, failed.text, failed.retry_after_s)
    return stream_failure(batch, 0, None, retry_after_s)


def finish_reason_of(error: BaseException) -> str:
    """Return the finish reason that the log shows for a request that ended with this error."""
    if not isinstance(error, ApiError):
        return "cancelled"
    return "timeout" if error.kind is ErrorKind.EXPIRED else "error"
