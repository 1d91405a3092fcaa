"""From a checked body to computed results, the same for every endpoint of this package."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar, cast

from penstock.frontend.generation.failures import finish_reason_of
from penstock.frontend.generation.models.capacity import check_capacity
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.request_policy import read_request_policy
from penstock.frontend.generation.submission.pooled_inputs import InputRules, encode_inputs, encode_templated
from penstock.frontend.generation.submission.pooled_run import PooledRun, PooledTimes, Wanted
from penstock.frontend.schemas.generation import SchedulingBody
from penstock.frontend.schemas.pooling.common import TruncatedBody
from penstock.frontend.telemetry.request_log import RequestLogEntry
from penstock.frontend.telemetry.trace_context import parse_traceparent
from penstock.frontend.text.input_encoder import EncodedInput, Truncation
from penstock.frontend.transport.asgi import Headers
from penstock.frontend.transport.errors import invalid
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.client import PooledResult
from penstock.shm.messages import ModelCard, PooledKind

Taken = TypeVar("Taken")
Other = TypeVar("Other")
HOW_TO_TRUNCATE = "truncate_prompt_tokens -1 truncates it"


@dataclass(frozen=True, slots=True)
class Computed(Generic[Taken]):
    results: list[Taken]
    request_id: str
    created: int
    num_tokens: int
    times: PooledTimes
    received_s: float
    num_truncated: int = 0

    def usage(self) -> dict[str, int]:
        """Return OpenAI's usage."""
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}

    def headers(self) -> Headers:
        """Return the same headers as those of a generated answer."""
        now_s = time.monotonic()
        spent_s = {
            "prepare": self.times.tokenized_s - self.received_s,
            "queue": self.times.queue_s,
            "total": now_s - self.received_s,
        }
        timing = ", ".join(f"{name};dur={round(1000 * duration_s, 3)}" for name, duration_s in spent_s.items())
        coalesced = b"joined" if self.times.num_coalesced else b"none"
        truncated = ((b"x-penstock-truncated", b"%d" % self.num_truncated),) if self.num_truncated else ()
        return ((b"x-penstock-coalesced", coalesced), (b"server-timing", timing.encode()), *truncated)

    def with_results(self, results: list[Other]) -> Computed[Other]:
        return cast("Computed[Other]", replace(self, results=results))  # type: ignore[arg-type]


async def compute(
    exchange: Exchange,
    body: SchedulingBody,
    served: ServedModel,
    encode: Callable[[], Coroutine[None, None, list[EncodedInput]]],
    wanted: Wanted,
    take: Callable[[PooledResult], Taken],
    *,
    num_inputs: int,
    field: str,
    id_prefix: str,
) -> Computed[Taken]:
    """Compute the wanted vectors of each input. take turns each result into a part of the answer as it comes.

    encode makes the inputs' tokens, unless a full backend refuses the request. field is the body's name of the inputs.
    Raises ApiError, ClientGoneError.
    """
    policy = read_request_policy(exchange, body)
    check_capacity(served, policy, may_share=num_inputs == 1)
    async with exchange.cancelled_on_disconnect():
        encoded = await encode()
    request_id, created = id_prefix + secrets.token_hex(12), int(time.time())
    log_entry = RequestLogEntry(
        request_id,
        exchange.received_s,
        http_request_id=exchange.request_id,
        key=exchange.key_name,
        model=served.card.model_id,
        path=exchange.path,
        trace=parse_traceparent(exchange.header(b"traceparent")),
        report_spans=exchange.report_spans,
    )
    run = PooledRun(exchange, served, wanted, policy, log_entry, field=field)
    try:
        results = await run.run(encoded, take)
    except BaseException as error:
        log_entry.finish_reason = finish_reason_of(error)
        raise
    finally:
        log_entry.queue_s = run.times.queue_s
        exchange.at_end.append(partial(log_entry.observe, served.backend.board, time.monotonic()))
    truncated = sum(each.num_whole_tokens > len(each.token_ids) for each in encoded)
    return Computed(results, request_id, created, log_entry.prompt_tokens, run.times, exchange.received_s, truncated)


def vllm_truncation(body: TruncatedBody, card: ModelCard, max_second_tokens: int | None = None) -> Truncation:
    """Read vLLM's fields. Raises ApiError."""
    requested, limit = body.truncate_prompt_tokens, card.max_context_tokens
    if requested is not None and requested > limit:
        invalid("truncate_prompt_tokens", f"{requested}, but the limit of this model is {limit} tokens")
    kept = limit if requested == -1 else requested
    return Truncation(kept, body.truncation_side or "right", max_second_tokens)


def vector_width(requested: int | None, kind: PooledKind, card: ModelCard) -> int:
    """Return Pooled.num_dimensions for a request. Raises ApiError."""
    width = card.pooled_width(kind) or 0
    if requested is not None and requested > width:
        invalid("dimensions", f"{requested}, but the embeddings of this model have {width} values")
    return requested or 0


def names_of(field: str, *, is_list: bool) -> Callable[[int], str]:
    """Return how errors name the input with an index."""
    return (lambda index: f"{field}[{index}]") if is_list else lambda _: field


async def encode_pairs(
    pairs: Sequence[tuple[str, str]], rules: InputRules, served: ServedModel, instruction: str | None
) -> list[EncodedInput]:
    """Encode pairs in the model's own way: by its tokenizer's template, or by the template of a decoder that reranks.

    Raises ApiError.
    """
    template = served.pooling.pair_template
    if template is not None:
        return await encode_templated(pairs, template, instruction, rules, served)
    if instruction is not None:
        invalid("instruction", "this model takes no instruction")
    return await encode_inputs(pairs, rules, served)
