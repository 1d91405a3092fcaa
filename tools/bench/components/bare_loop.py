"""The backend's real loop with stand-ins: a link that sends nothing, and a device whose steps end at once."""

from __future__ import annotations

import itertools
import time
from array import array
from typing import TYPE_CHECKING, Any, cast

from penstock.backend.engine.batch_builder import BatchBuilder
from penstock.backend.engine.launched_step import StepResult
from penstock.backend.engine.limits import EngineLimits
from penstock.backend.engine.loop import Engine
from penstock.backend.engine.requests import Requests
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.shm.link.connected_frontend import ConnectedFrontend
from penstock.shm.link.events import Submission
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import EventLogprobs, Failure, Finish, Generate, Sampling, Started, encode

if TYPE_CHECKING:
    from penstock.backend.engine.recording.recorder import Recorder
    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.scheduling.step_plan import Plan
    from penstock.shm.link.events import LinkEvent
    from penstock.shm.link.rendezvous import ControlConnection

_NUM_FRONTENDS = 4
_CONTEXT_TOKENS = 4096
_PAGE_SIZE_TOKENS = 32
_PROMPT_TOKENS = 64
_VOCAB_SIZE = 32_000


class UnsentLink:
    """BackendLink without sockets: every message is built, none is sent."""

    def __init__(self) -> None:
        self.arrivals: list[LinkEvent] = []
        no_connection = cast("ControlConnection", None)
        self._peers = {
            epoch: ConnectedFrontend(epoch, no_connection, _CONTEXT_TOKENS, 1) for epoch in range(_NUM_FRONTENDS)
        }
        self._pending: dict[int, ConnectedFrontend] = {}

    def receive(self) -> list[LinkEvent]:
        arrived, self.arrivals = self.arrivals, []
        return arrived

    def push(
        self,
        frontend: int,
        request_id: int,
        token_id: int,
        finish: Finish = Finish.NONE,
        started: Started | None = None,
        failure: Failure | None = None,
        logprobs: EventLogprobs | None = None,
    ) -> None:
        peer = self._pending[frontend] = self._peers[frontend]
        peer.add(request_id, token_id, finish, started, failure, logprobs)

    def note_preemption(self, frontend: int, request_id: int) -> None:
        self._peers[frontend].add_preemption(request_id)

    def push_tokens(self, frontend: int, request_ids: list[int], token_ids: list[int]) -> None:
        peer = self._pending[frontend] = self._peers[frontend]
        peer.add_tokens(request_ids, token_ids)

    def flush(self) -> None:
        for peer in self._pending.values():
            encode(peer.next_outputs())
            peer.sent()
        self._pending.clear()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


class InstantExecutor:
    """An Executor without a device: a step ends when `run_one` says so. Holds one plan behind the running one."""

    def __init__(self) -> None:
        self._launched: list[Plan] = []
        self._results: list[StepResult] = []
        self._token_ids = itertools.cycle(range(1, _VOCAB_SIZE))

    @property
    def has_capacity(self) -> bool:
        return len(self._launched) + len(self._results) <= 1

    def run_one(self) -> None:
        plan = self._launched.pop(0)
        self._results.append(StepResult(plan, [next(self._token_ids) for _ in plan.logit_rows], 0.0))

    def running_s(self) -> float:
        return 0.0

    def clear_wake(self) -> None:
        pass

    def launch(self, plan: Plan, _batch: StepBatch, _saves: object) -> None:
        self._launched.append(plan)

    def results(self) -> list[StepResult]:
        results, self._results = self._results, []
        return results


class BareLoop:
    """The engine with stand-ins for link and device. Its turns are timed in CPU time of the thread."""

    def __init__(self, num_running: int, recorder: Recorder | None = None) -> None:
        pages_per_sequence = _CONTEXT_TOKENS // _PAGE_SIZE_TOKENS
        self._link, self._executor, self._board = UnsentLink(), InstantExecutor(), BackendBoard.create()
        self._scheduler = Scheduler(
            PagePool(num_running * pages_per_sequence), _PAGE_SIZE_TOKENS, num_running, max(512, num_running)
        )
        link, executor = cast("Any", self._link), cast("Any", self._executor)
        limits = EngineLimits(_VOCAB_SIZE, _CONTEXT_TOKENS, max_waiting=1 << 20)
        self._engine = Engine(
            link,
            executor,
            self._scheduler,
            BatchBuilder(num_running, pages_per_sequence),
            Requests.make(link, self._scheduler, self._board, limits, recorder=recorder),
            self._board,
        )
        self._num_submitted = 0

    def submit(self, count: int) -> None:
        """Submit requests that run to the end of the context. Prompts have one length and no common prefix."""
        for number in range(self._num_submitted, self._num_submitted + count):
            tokens = array("i", [number % _VOCAB_SIZE, number // _VOCAB_SIZE, *range(2, _PROMPT_TOKENS)]).tobytes()
            message = Generate(
                request_id=number,
                tokens=tokens,
                num_prompt_tokens=_PROMPT_TOKENS,
                max_tokens=_CONTEXT_TOKENS,
                sampling=Sampling(temperature=0.0),
            )
            self._link.arrivals.append(Submission(number % _NUM_FRONTENDS, message, tokens))
        self._num_submitted += count

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def turn_ms(self) -> float:
        started_ns = time.thread_time_ns()
        self._engine.turn()
        elapsed_ms = (time.thread_time_ns() - started_ns) / 1e6
        self._executor.run_one()
        return elapsed_ms

    def settle(self, num_running: int, num_turns: int) -> None:
        """Run until num_running sequences run, then num_turns more: after those, all of them decode."""
        while self._scheduler.num_running < num_running:
            self.turn_ms()
        for _ in range(num_turns):
            self.turn_ms()

    def close(self) -> None:
        self._link.close()
        self._board.close()
