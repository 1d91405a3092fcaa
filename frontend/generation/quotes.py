"""Asks the backend when a request would finish, without running it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.frontend.generation.failures import backend_unavailable, milliseconds, overloaded, stream_failure
from penstock.frontend.generation.models.model_table import answering_name
from penstock.frontend.generation.submission.submit import generation_requests, quote_terms
from penstock.frontend.schemas.answers import QuoteAnswer
from penstock.frontend.transport.errors import ApiError, ErrorKind
from penstock.shm.client import BackendUnavailable, Finish, Overloaded

if TYPE_CHECKING:
    from penstock.frontend.generation.models.served_model import ServedModel
    from penstock.frontend.generation.request_policy import RequestPolicy
    from penstock.frontend.generation.submission.submit import PreparedRequest


async def answer_quote(request: PreparedRequest, policy: RequestPolicy, served: ServedModel) -> QuoteAnswer:
    """Return the quote of a request, which does not run. Raises ApiError."""
    backend = served.backend
    prompts, planned, _ = await generation_requests(request, policy, served)
    try:
        stream = backend.ask_quote(planned[0], quote_terms(request, planned))
    except Overloaded as error:
        raise overloaded(error.retry_after_s, error.limit) from None
    except BackendUnavailable:
        raise backend_unavailable(backend.retry_after_s) from None
    try:
        batch = await stream.result()
        if batch.finish is not Finish.QUOTED:
            raise stream_failure(batch, 0, None, backend.retry_after_s)
    finally:
        stream.cancel()
    quote = stream.quote
    if quote is None:
        raise ApiError(ErrorKind.INTERNAL, "the backend gave no quote")
    is_known = quote.first_token_s is not None and quote.finish_s is not None
    left_s = None if policy.deadline_s is None else policy.deadline_s - time.monotonic()
    return QuoteAnswer(
        model=answering_name(served.card, request.body.model),
        status="known" if is_known else "unknown",
        queue_position=quote.num_ahead,
        prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        cached_tokens=quote.cached_tokens,
        coalesced=quote.is_coalesced,
        expected_completion_tokens=quote.expected_tokens,
        expected_ttft_ms=milliseconds(quote.first_token_s),
        expected_finish_ms=milliseconds(quote.finish_s),
        latest_finish_ms=milliseconds(quote.latest_finish_s),
        meets_deadline=None if left_s is None or quote.finish_s is None else quote.finish_s <= left_s,
    )
