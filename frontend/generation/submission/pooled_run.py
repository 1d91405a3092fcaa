"""Runs the inputs of one request: sends them in portions, collects the results, and ends all of them together."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.frontend.generation.failures import backend_unavailable, expired, overloaded, pooled_failure
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.request_policy import RequestPolicy
from penstock.frontend.telemetry.request_log import RequestLogEntry
from penstock.frontend.text.input_encoder import EncodedInput
from penstock.frontend.transport.errors import ApiError, ErrorKind, shutting_down
from penstock.frontend.transport.exchange import Exchange, PlannedUse
from penstock.shm.client import (
    BackendUnavailable,
    FailureCode,
    Finish,
    Overloaded,
    PooledFailed,
    PooledRequest,
    PooledResult,
    PooledStream,
)
from penstock.shm.messages import PooledKind

Taken = TypeVar("Taken")

PORTION = 128
"""Inputs of a request that are in the backend at a time: more than a step takes, far fewer than may wait there."""
_AT_ONCE = 32
"""Inputs that are submitted in one turn of the event loop, and travel in one message."""
_INLINE_VALUES = 1 << 13
"""Larger results are written in a thread: this many values take about 0.7 ms."""
MAX_VALUES = 1 << 23
"""Values of one answer, which are about 100 MB of JSON: a request with a vector for each token may ask for more."""
_groups = itertools.count(1)
"""A number per request, for `PooledRequest.group`."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The vectors to compute for each input."""

    kind: PooledKind
    num_dimensions: int = 0
    normalize: bool = False


@dataclass(slots=True)
class PooledTimes:
    """Times in seconds, and counts, that the results of one request report."""

    tokenized_s: float = 0.0
    """Monotonic: when all inputs were tokens."""
    queue_s: float = 0.0
    """The longest time that an input waited for its step."""
    num_coalesced: int = 0
    num_cached: int = 0


class PooledRun:
    """One request's inputs in the backend."""

    def __init__(
        self,
        exchange: Exchange,
        served: ServedModel,
        wanted: Wanted,
        policy: RequestPolicy,
        log_entry: RequestLogEntry,
        *,
        field: str,
    ) -> None:
        """field is the body's name of the inputs, for errors."""
        self.times = PooledTimes()
        self._exchange = exchange
        self._card = served.card
        self._backend = served.backend
        self._wanted = wanted
        self._policy = policy
        self._log_entry = log_entry
        self._field = field
        self._group = 0
        self._open: deque[tuple[int, PooledStream]] = deque()
        self._num_submitted = 0
        self._has_results = False
        self._is_refused = False
        """A full backend has refused an input. More are sent after the next result of this request or, while none of
        its inputs is in the backend, when there is room."""
        self._changed = asyncio.Event()
        """Wakes a request that waits for room."""
        self._is_cancelled = False

    def cancel(self) -> None:
        """End all inputs now."""
        self._is_cancelled = True
        self._changed.set()
        for _, stream in self._open:
            stream.cancel()

    async def run(self, inputs: Sequence[EncodedInput], take: Callable[[PooledResult], Taken]) -> list[Taken]:
        """Return the output of take for each result, in the order of the inputs. It is called as the results come.

        A full backend refuses the request only if none of its inputs has been computed; after that the rest waits.
        Raises ApiError, ClientGoneError.
        """
        num_tokens = sum(len(each.token_ids) for each in inputs)
        self._check_size(len(inputs), num_tokens)
        self.times.tokenized_s = self._log_entry.submitted_s = time.monotonic()
        self._log_entry.prompt_tokens = num_tokens
        claim = self._exchange.claim
        if claim is not None:
            claim.reserve(PlannedUse(1, self._field, num_tokens, 0, self._field, is_stated=True))
        self._exchange.on_disconnect(self.cancel)
        self._group = next(_groups) if len(inputs) > 1 else 0
        waiting = deque(range(len(inputs)))
        taken: dict[int, Taken] = {}
        num_used = 0
        try:
            while waiting or self._open:
                await self._submit(waiting, inputs)
                index, stream = self._open[0]  # open while it is awaited, so that `cancel` ends it
                result = await self._result(stream)
                self._open.popleft()
                if result is None:
                    waiting.appendleft(index)
                    continue
                num_used += result.num_prompt_tokens
                is_large = len(result.values) > _INLINE_VALUES
                taken[index] = await asyncio.to_thread(take, result) if is_large else take(result)
                self._note(result)
        finally:
            self.cancel()
            if claim is not None:
                claim.settle(num_used)
        self._log_entry.finish_reason = "stop"
        return [taken[index] for index in range(len(inputs))]

    def _check_size(self, num_inputs: int, num_tokens: int) -> None:
        """Refuse an answer that is too large before anything is computed. Raises ApiError."""
        wanted = self._wanted
        if wanted.kind == "sparse":
            return
        width = wanted.num_dimensions or self._card.pooled_width(wanted.kind) or 0
        is_by_token = wanted.kind in ("token_embed", "token_classify")
        num_vectors, unit = (num_tokens, "tokens") if is_by_token else (num_inputs, "inputs")
        if num_vectors * width > MAX_VALUES:
            message = f"{num_vectors} {unit} with {width} values each; the limit of one answer is {MAX_VALUES} values"
            raise ApiError(ErrorKind.TOO_MANY_INPUTS, f"{self._field}: {message}", param=self._field)

    async def _submit(self, waiting: deque[int], inputs: Sequence[EncodedInput]) -> None:
        """Send inputs until a portion is open. Returns with at least one open. Raises ApiError, ClientGoneError."""
        while waiting and len(self._open) < PORTION:
            if self._is_cancelled:
                raise self._exchange.ending or shutting_down()
            if self._is_refused:
                if self._open:
                    return
                await self._wait_for_room()
                continue
            try:
                stream = self._backend.submit_pooled(self._request(inputs[waiting[0]]))
            except Overloaded as error:
                if not self._open:  # after the first result it is the backend that refuses
                    raise overloaded(error.retry_after_s, error.limit) from None
                self._is_refused = True
            except BackendUnavailable:
                raise backend_unavailable(self._backend.retry_after_s) from None
            else:
                self._open.append((waiting.popleft(), stream))
                self._num_submitted += 1
                if waiting and self._num_submitted % _AT_ONCE == 0:
                    await asyncio.sleep(0)  # many inputs must not hold the event loop

    async def _result(self, stream: PooledStream) -> PooledResult | None:
        """Return the result; None if a full backend has refused the input and it must be sent again.

        Raises ApiError, ClientGoneError.
        """
        try:
            result = await stream.result()
        except PooledFailed as failed:
            if failed.finish is Finish.CANCELLED:
                raise self._exchange.ending or shutting_down() from None
            if failed.failure is FailureCode.OVERLOADED and self._has_results:
                self._is_refused = True
                return None
            raise pooled_failure(failed, self._field, self._backend.retry_after_s) from None
        self._has_results, self._is_refused = True, False
        self._log_entry.note_replicas((stream,))
        return result

    async def _wait_for_room(self) -> None:
        """Return when the backend has room, or the request is cancelled. Raises ApiError at its deadline."""
        self._changed.clear()
        room = asyncio.ensure_future(self._backend.wait_for_room())
        room.add_done_callback(lambda _: self._changed.set())
        deadline_s = self._policy.deadline_s
        try:
            async with asyncio.timeout(None if deadline_s is None else max(0.0, deadline_s - time.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            raise expired() from None
        finally:
            room.cancel()
        self._is_refused = False

    def _request(self, encoded: EncodedInput) -> PooledRequest:
        policy, wanted = self._policy, self._wanted
        return PooledRequest(
            encoded.token_ids,
            wanted.kind,
            encoded.second_start,
            wanted.num_dimensions,
            wanted.normalize,
            salt=policy.salt,
            tenant=policy.tenant,
            weight=policy.weight,
            priority=policy.priority,
            deadline_s=policy.deadline_s,
            group=self._group,
            may_share=policy.may_join,
            has_begun=self._has_results,
        )

    def _note(self, result: PooledResult) -> None:
        times = self.times
        times.queue_s = max(times.queue_s, result.queue_s)
        times.num_coalesced += result.is_coalesced
        times.num_cached += result.is_cached
        self._log_entry.coalesced = "joined" if times.num_coalesced else "none"
        self._log_entry.cached_tokens += result.num_prompt_tokens if result.is_cached else 0
