"""The engine with its executor's threads and without its link: tokens are noted with their time, and not sent."""

from __future__ import annotations

import gc
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.backend.engine.requests.limits import EngineLimits
from penstock.backend.engine.steps.executor import SWITCH_INTERVAL_S, Executor
from penstock.backend.engine.steps.launched_step import StepResult
from penstock.backend.forward_pass import IBatchedForwardPass
from penstock.process.garbage_collection import resume_collection
from penstock.shm.link.events import Submission
from penstock.shm.messages import Failure, Finish, Generate, Sampling, Started
from penstock.tools.engine_rig import DroppingLink, EngineRig, RigSizes

_GREEDY = Sampling(temperature=0.0)
_WAIT_S = 5.0
"""Timeout for the next result; a step takes far less."""
_ANY_TOKEN = (1 << 31) - 1
"""Stands for the size of the vocabulary: the pass checks its tokens itself."""


@dataclass(eq=False)
class TokenStream:
    """One request, its tokens and their times, in seconds of the monotonic clock."""

    submitted_s: float
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)


class _TimingLink(DroppingLink):
    def __init__(self) -> None:
        super().__init__()
        self.open: dict[int, TokenStream] = {}
        self.ended: list[TokenStream] = []
        self.fault = ""
        """How a request ended, if not after its last token."""

    def push(
        self, frontend: int, request_id: int, token_id: int, finish: Finish = Finish.NONE,
        started: Started | None = None, failure: Failure | None = None, *others: Any, **named: Any,
    ) -> None:  # fmt: skip
        super().push(frontend, request_id, token_id, finish, started, failure, *others, **named)
        stream = self.open[request_id]
        if token_id >= 0:
            stream.token_ids.append(token_id)
            stream.token_times_s.append(time.monotonic())
        if finish:
            self.ended.append(self.open.pop(request_id))
        if finish not in (Finish.NONE, Finish.LENGTH):
            self.fault = f"request {request_id} ended as {finish.name}: {failure}"


class _RaisingExecutor(Executor):
    """Raises the error of a failed step, as there is no other request to save."""

    def results(self) -> list[StepResult]:
        results = super().results()
        for result in results:
            if result.error is not None:
                raise result.error
        return results


class EngineLoop:
    """Used by one thread. The pass belongs to the executor's thread."""

    def __init__(self, make_pass: Callable[[], IBatchedForwardPass], sizes: RigSizes, max_context_tokens: int) -> None:
        """make_pass runs on the executor's thread, and also creates the cache."""
        self._executor, self._link = _RaisingExecutor(1), _TimingLink()
        self._executor.start(make_pass)
        # As a backend does before it serves. Without it, a collection of torch's objects stops steps for 0.1 s.
        resume_collection()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        limits = EngineLimits(_ANY_TOKEN, max_context_tokens, max_waiting=1 << 20)
        self._rig = EngineRig(self._link, self._executor, sizes, limits)
        self._num_submitted = 0
        self.on_end: Callable[[TokenStream], None] = lambda _stream: None
        """Called with each stream that ends, between steps. It may submit more requests."""

    @property
    def num_open(self) -> int:
        return len(self._link.open)

    def submit(self, prompt: NDArray[np.int32], num_new_tokens: int) -> TokenStream:
        tokens, number = prompt.tobytes(), self._num_submitted
        self._num_submitted += 1
        message = Generate(
            request_id=number, tokens=tokens, num_prompt_tokens=len(prompt), max_tokens=num_new_tokens, sampling=_GREEDY
        )
        self._link.arrivals.append(Submission(0, message, tokens))
        stream = self._link.open[number] = TokenStream(time.monotonic())
        return stream

    def run(self, until: Callable[[], bool]) -> None:
        """Run until `until()` is true or no request is open.

        Raises the error of a failed step, ArithmeticError if a request fails without one, and TimeoutError if a step
        does not end in time.
        """
        while self._link.open and not until():
            self._turn()
            if self._link.arrivals or not self._executor.is_busy:
                continue
            plan_due_s = self._rig.engine.plan_due_s
            wait_s = _WAIT_S if plan_due_s is None else plan_due_s
            has_result = select.select([self._executor.wake_fd], [], [], wait_s)[0]
            if not has_result and plan_due_s is None:
                raise TimeoutError(f"no step ended within {_WAIT_S:g} s")

    def close(self) -> None:
        """Stop the executor and its pass. Open requests are dropped."""
        self._executor.close()
        self._rig.board.close()
        gc.unfreeze()  # the next model needs the memory of this one, which may be in cycles of references

    def _turn(self) -> None:
        self._rig.engine.turn()
        if self._link.fault:
            raise ArithmeticError(self._link.fault)
        ended, self._link.ended = self._link.ended, []
        for stream in ended:
            self.on_end(stream)
