"""Questions to a backend about its requests. They run nothing, and are answered at once."""

from __future__ import annotations

import time

from penstock.frontend.generation.failures import backend_unavailable, overloaded, stream_failure
from penstock.shm.client import (
    AnswerStream,
    BackendClient,
    BackendUnavailable,
    FailureCode,
    Finish,
    Overloaded,
    Question,
)

_TIMEOUT_S = 5.0


async def ask(backend: BackendClient, question: Question, timeout_s: float = _TIMEOUT_S) -> AnswerStream | None:
    """Cancel a request, ask about a stream, or change an adapter.

    Returns the stream that brought the answer; None if the backend does not know the request or the stream. Raises
    ApiError.
    """
    answer = None
    try:
        answer = backend.ask(question, deadline_s=time.monotonic() + timeout_s)
        batch = await answer.result()
        if batch.failure is FailureCode.NOT_OPEN:
            return None
        if batch.finish is not Finish.STOP:
            raise stream_failure(batch, 0, None, backend.retry_after_s)
    except BackendUnavailable:
        raise backend_unavailable(backend.retry_after_s) from None
    except Overloaded as error:
        raise overloaded(error.retry_after_s, error.limit) from None
    finally:
        if answer is not None:
            answer.cancel()
    return answer
