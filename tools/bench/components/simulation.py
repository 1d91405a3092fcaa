"""The backend's real loop under load, with a simulated device, simulated clients and a simulated clock.

Requests, pages, plans and messages are real; the CPU time that the thread spends on them is added to the clock. Every
step of the device lasts STEP_S. A message between backend and client takes WIRE_S. Steps and tokens are therefore exact
counts, which other processes on a busy machine cannot change.
"""

from __future__ import annotations

import heapq
import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from penstock.backend.engine.batch_builder import BatchBuilder
from penstock.backend.engine.limits import EngineLimits
from penstock.backend.engine.loop import Engine
from penstock.backend.engine.requests import Requests
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.shm.link.events import Cancellation, Submission
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import Generate, Sampling
from penstock.tools.bench.components.simulated_device import VOCAB_SIZE, RecordingLink, SimulatedDevice

if TYPE_CHECKING:
    from penstock.backend.engine.step_timing import StepTiming
    from penstock.tools.bench.load_generator.workload import PlannedRequest

WIRE_S = 0.001
"""Time of a message from the backend to a client, or back."""
_PAGE_SIZE_TOKENS = 32
_CONTEXT_TOKENS = 1 << 13
_NUM_FRONTENDS = 4


@dataclass(slots=True)
class _Request:
    """One request, as its client observes it."""

    planned: PlannedRequest
    sent_s: float
    sent_at_step: int
    is_burst: bool
    num_tokens: int = 0
    first_s: float = 0.0
    first_at_step: int = 0
    has_ended: bool = False
    """The request has been answered, or its client has hung up."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of one load. Times are those of the simulated clock."""

    duration_s: float
    steps: int
    idle_s: float
    """Time that the device waited for the host, between its first step and its last."""
    output_tokens: int
    """Tokens that reached a client before it hung up."""
    computed_tokens: int
    wasted_tokens: int
    """Tokens computed in rows whose sequence had ended when the result of the step arrived."""
    saved_tokens: int
    """Tokens planned but not computed, because their sequence had ended when the step began."""
    ttfts_ms: list[float]
    """Times to first token in the closed loop."""
    burst_steps: list[list[int]]
    """Steps that ended between sending a request and its first token: a rising list for each burst."""

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s

    @property
    def idle_us(self) -> float:
        """Mean idle time per step."""
        return 1e6 * self.idle_s / self.steps

    @property
    def tokens_per_step(self) -> float:
        return self.output_tokens / self.steps


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that are all sent at once, in addition to the closed loop."""

    at_s: float
    requests: Sequence[PlannedRequest]


class Simulation:
    """One backend and the clients of a closed loop. Each client sends its next request when its last has ended.

    Runs one load.
    """

    def __init__(
        self, capacity: int, max_running: int, max_batch_tokens: int, *, step_timing: StepTiming | None = None
    ) -> None:
        self._device, self._link, self._board = SimulatedDevice(capacity), RecordingLink(), BackendBoard.create()
        pages_per_sequence = _CONTEXT_TOKENS // _PAGE_SIZE_TOKENS
        pool = PagePool(max_running * pages_per_sequence)
        scheduler = Scheduler(pool, _PAGE_SIZE_TOKENS, max_running, max_batch_tokens, num_plans_ahead=capacity)
        link, executor = cast("Any", self._link), cast("Any", self._device)
        requests = Requests.make(
            link, scheduler, self._board, EngineLimits(VOCAB_SIZE, _CONTEXT_TOKENS, max_waiting=1 << 20)
        )
        builder = BatchBuilder(max_running, pages_per_sequence)
        self._engine = Engine(link, executor, scheduler, builder, requests, self._board, step_timing=step_timing)
        self._now_s = 0.0
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        """Heap of (time, sequence number, action)."""
        self._order = itertools.count()
        self._requests: list[_Request] = []
        self._unsent: deque[PlannedRequest] = deque()

    def run(
        self, requests: Sequence[PlannedRequest], concurrency: int, bursts: Sequence[Burst] = ()
    ) -> SimulationResult:
        """The prompts of the requests are token ids."""
        self._unsent.extend(requests)
        for _ in range(concurrency):
            self._at(0.0, self._send_next)
        burst_of: list[list[_Request]] = [[] for _ in bursts]
        for burst, sent in zip(bursts, burst_of, strict=True):
            self._at(burst.at_s, partial(self._send_burst, burst, sent))
        while (due_s := self._next_due_s()) is not None:
            self._turn(max(self._now_s, due_s))
        device, board = self._device, self._board
        return SimulationResult(
            duration_s=self._now_s,
            steps=device.num_steps,
            idle_s=device.idle_s,
            output_tokens=sum(request.num_tokens for request in self._requests),
            computed_tokens=board.computed_tokens,
            wasted_tokens=board.wasted_tokens,
            saved_tokens=device.saved_tokens,
            ttfts_ms=[
                1000 * (request.first_s - request.sent_s)
                for request in self._requests
                if request.num_tokens and not request.is_burst
            ],
            burst_steps=[sorted(request.first_at_step - request.sent_at_step for request in sent) for sent in burst_of],
        )

    def close(self) -> None:
        self._link.close()
        self._board.close()

    def _next_due_s(self) -> float | None:
        due_s = [self._due[0][0]] if self._due else []
        if (device_s := self._device.next_due_s(self._now_s)) is not None:
            due_s.append(device_s)
            if (plan_due_s := self._engine.plan_due_s) is not None:
                due_s.append(self._now_s + plan_due_s)
        return min(due_s, default=None)

    def _at(self, at_s: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), action))

    def _turn(self, now_s: float) -> None:
        """Do everything that is due now, then run one turn of the loop and add its CPU time to the clock."""
        self._device.advance(now_s)
        while self._due and self._due[0][0] <= now_s:
            at_s, _, action = heapq.heappop(self._due)
            action(at_s)
        started_ns = time.thread_time_ns()
        self._engine.turn()
        self._now_s = now_s = now_s + (time.thread_time_ns() - started_ns) / 1e9
        self._device.advance(now_s)
        self._device.take_plans(now_s)
        pushed, self._link.pushed = self._link.pushed, []
        for request_id, has_token, is_end in pushed:
            self._deliver(request_id, has_token, is_end, now_s + WIRE_S)

    def _send_next(self, now_s: float) -> None:
        if self._unsent:
            self._send(self._unsent.popleft(), now_s, is_burst=False)

    def _send_burst(self, burst: Burst, sent: list[_Request], now_s: float) -> None:
        sent += [self._send(planned, now_s, is_burst=True) for planned in burst.requests]

    def _send(self, planned: PlannedRequest, now_s: float, *, is_burst: bool) -> _Request:
        request_id = len(self._requests)
        request = _Request(planned, now_s, self._device.num_steps, is_burst)
        self._requests.append(request)
        tokens = array("i", cast("tuple[int, ...]", planned.prompt))
        packed, sampling = tokens.tobytes(), Sampling(temperature=0.0)
        message = Generate(
            request_id=request_id,
            tokens=packed,
            num_prompt_tokens=len(tokens),
            max_tokens=planned.output_tokens,
            sampling=sampling,
        )
        submission = Submission(request_id % _NUM_FRONTENDS, message, packed)
        self._at(now_s + WIRE_S, lambda _now_s: self._link.arrivals.append(submission))
        if planned.drop is not None and planned.drop.after_events == 0:
            self._at(now_s + planned.drop.delay_s, lambda now_s: self._hang_up(request_id, now_s))
        return request

    def _hang_up(self, request_id: int, now_s: float) -> None:
        if self._requests[request_id].has_ended:
            return
        self._end(request_id, now_s)
        cancellation = Cancellation(request_id % _NUM_FRONTENDS, request_id, 0)
        self._at(now_s + WIRE_S, lambda _now_s: self._link.arrivals.append(cancellation))

    def _deliver(self, request_id: int, has_token: bool, is_end: bool, at_s: float) -> None:
        request = self._requests[request_id]
        if request.has_ended:
            return
        if has_token:
            request.num_tokens += 1
            if request.num_tokens == 1:
                request.first_s, request.first_at_step = at_s, self._device.num_steps
            drop = request.planned.drop
            if drop is not None and request.num_tokens == drop.after_events:
                self._at(at_s + drop.delay_s, lambda now_s: self._hang_up(request_id, now_s))
        if is_end:
            self._end(request_id, at_s)

    def _end(self, request_id: int, at_s: float) -> None:
        request = self._requests[request_id]
        request.has_ended = True
        if not request.is_burst:
            self._at(at_s, self._send_next)
