"""The thread that owns the device: it loads the forward pass and runs the steps it is given, in order."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias, cast

from penstock.backend.buffers.shared_outputs import share_outputs
from penstock.backend.engine.batch_builder import keep_rows
from penstock.backend.forward_pass import NOT_FINITE, DeviceLost
from penstock.backend.structured_output.constraints import ConstraintFailed
from penstock.backend.structured_output.masks import fill_masks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.backend.forward_pass import (
        IBatchedForwardPass,
        IHostPages,
        PendingOutput,
        StepBatch,
        TokenLogprobs,
        TokenMasks,
    )
    from penstock.backend.scheduling.step_plan import Plan

    Pairs: TypeAlias = tuple[tuple[int, int], ...]

_CLOSE_TIMEOUT_S = 10.0


class ExecutorFailed(Exception):
    """The device's thread has died, hangs, or fails every step: this process can serve no more, only be restarted."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought. plan is of the rows that ran; token_ids has one entry for each of its logit_rows."""

    plan: Plan
    token_ids: list[int]
    step_s: float
    error: Exception | None = None
    launch_s: float = 0.0
    """CPU time of the launch, where the device computes only behind it."""
    stops: tuple[int, ...] = ()
    """Indices of rows whose token ends their sequence, as far as its listeners wished when it was sampled."""
    logprobs: TokenLogprobs | None = None
    """Its rows are places in the plan's logit_rows."""
    faults: dict[int, str] = field(default_factory=dict)
    """By place in logit_rows, why a row's constraints cannot go on; its token is NOT_FINITE, whatever was sampled."""


class Executor:
    """Runs at most one step at a time and holds at most `capacity` plans ready behind it.

    Membership is bound late: rows whose sequence ended or was preempted after they were planned are dropped as the step
    is launched. `wake_fd` becomes readable when a result is there.

    A pass that runs ahead is given the plans as they come, and a second thread waits for what they bring.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._plans: queue.SimpleQueue[tuple[Plan, StepBatch, Pairs] | None] = queue.SimpleQueue()
        self._results: deque[StepResult] = deque()
        self._num_in_flight = 0
        self._launched: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()
        self._step_starts_s: deque[float] = deque()
        """Of the steps launched and not finished."""
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._pass: IBatchedForwardPass | None = None
        self._load_error: BaseException | None = None
        self._loaded = threading.Event()
        self._closing = False
        self._fatal: BaseException | None = None

    def start(self, load: Callable[[], IBatchedForwardPass]) -> IBatchedForwardPass:
        """Loads the pass on the thread that will run it, and waits for that. Raises what load raises."""
        self._thread = threading.Thread(target=self._run, args=(load,), name="executor", daemon=True)
        self._thread.start()
        self._loaded.wait()
        if self._load_error is not None:
            raise self._load_error
        if self._pass is None:
            raise RuntimeError("the forward pass neither loaded nor failed; this is a bug")
        return self._pass

    @property
    def has_capacity(self) -> bool:
        """One more plan may be launched: one step running and `capacity` plans behind it are not yet reached."""
        return self._num_in_flight <= self._capacity

    @property
    def is_busy(self) -> bool:
        return self._num_in_flight > 0

    def running_s(self) -> float:
        """Seconds since the running step began; 0 when none runs."""
        try:
            return time.monotonic() - self._step_starts_s[0]
        except IndexError:
            return 0.0

    def launch(self, plan: Plan, batch: StepBatch, saves: Pairs) -> None:
        """saves: (page, place on the host), copied before the step even if no row of it is left by then."""
        self._num_in_flight += 1
        self._plans.put((plan, batch, saves))

    def results(self) -> list[StepResult]:
        """The results since the last call, in the order of launching. Raises ExecutorFailed if the thread has died."""
        if self._fatal is not None:
            raise ExecutorFailed(_end_of(self._fatal)) from self._fatal
        results = []
        while self._results:
            results.append(self._results.popleft())
        self._num_in_flight -= len(results)
        return results

    def clear_wake(self) -> None:
        """Call before `results`, so that a result that comes in between wakes again."""
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return

    def wake(self) -> None:
        """Safe from any thread and from a signal handler."""
        os.eventfd_write(self.wake_fd, 1)

    def close(self) -> None:
        """Ends the thread after the running step, and closes the pass. Raises ExecutorFailed if that does not end well.

        wake_fd stays open: a late signal may still write to it.
        """
        self._closing = True
        self._plans.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                raise ExecutorFailed(f"the running step has not ended in {_CLOSE_TIMEOUT_S:g} s")
        if self._fatal is not None:
            raise ExecutorFailed(_end_of(self._fatal)) from self._fatal

    def _run(self, load: Callable[[], IBatchedForwardPass]) -> None:
        try:
            self._pass = load()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in start()
            self._load_error = error
            return
        finally:
            self._loaded.set()
        try:
            if self._pass.spec.runs_ahead:
                self._run_ahead(self._pass)
            else:
                for step in self._launch_plans(self._pass):
                    self._finish(step)
            self._pass.close()
        except BaseException as error:  # noqa: BLE001 - raised again in the loop, by results() or close()
            self._fatal = error
            self.wake()

    def _launch_plans(self, forward_pass: IBatchedForwardPass) -> Iterator[LaunchedStep]:
        """Launches the plans as they come, until the executor is closed."""
        before: LaunchedStep | None = None
        while (planned := self._plans.get()) is not None:
            if not self._closing:
                self._step_starts_s.append(time.monotonic())
                began_s = time.thread_time()
                before = launch_step(forward_pass, *planned, before)
                if forward_pass.spec.runs_ahead:
                    before = replace(before, launch_s=time.thread_time() - began_s)
                yield before

    def _run_ahead(self, forward_pass: IBatchedForwardPass) -> None:
        collector = threading.Thread(target=self._collect, name="collector", daemon=True)
        collector.start()
        try:
            for step in self._launch_plans(forward_pass):
                self._launched.put(step)
        finally:
            self._launched.put(None)
            collector.join()

    def _collect(self) -> None:
        try:
            while (step := self._launched.get()) is not None:
                self._finish(step)
        except BaseException as error:  # noqa: BLE001 - as in `_run`
            self._fatal = error
            self.wake()

    def _finish(self, step: LaunchedStep) -> None:
        finished = step.finish()
        now_s = time.monotonic()
        started_s = self._step_starts_s.popleft()
        if self._step_starts_s:  # launched while this one ran; it begins now
            self._step_starts_s[0] = now_s
        self._results.append(replace(finished, step_s=now_s - started_s, launch_s=step.launch_s))
        self.wake()


def _end_of(fault: BaseException) -> str:
    if isinstance(fault, DeviceLost):  # as pages were saved, which is no request's affair
        return f"the device is lost: {fault}"
    return "the thread that runs the forward pass has died"


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device has been given: the rows that run, and what will come of it or why nothing will."""

    plan: Plan
    output: PendingOutput | None
    """None where there is nothing to wait for, or after an error."""
    error: Exception | None = None
    launch_s: float = 0.0
    faults: dict[int, str] = field(default_factory=dict)
    is_finished: threading.Event = field(default_factory=threading.Event)
    """Its tokens have been taken in by the constraints of their sequences."""

    def finish(self) -> StepResult:
        """Waits for the tokens of the rows that sample, or gives the fault. Marks sequences that stop, so that plans
        made meanwhile drop their rows."""
        try:
            result = self._take_in()
        except Exception as fault:  # noqa: BLE001 - the step's requests fail with it, see Engine; others go on
            _stop_rows(self.plan)
            result = StepResult(self.plan, [], 0.0, fault)
        self.is_finished.set()
        return result

    def _take_in(self) -> StepResult:
        plan, faults = self.plan, self.faults
        if self.error is not None:
            raise self.error
        if self.output is None:
            return StepResult(plan, [], 0.0)
        output = self.output.wait()
        token_ids = output.token_ids.tolist()
        if len(token_ids) != len(plan.logit_rows):
            raise RuntimeError(f"{len(token_ids)} tokens sampled for {len(plan.logit_rows)} rows")
        stops = []
        for place, (index, token_id) in enumerate(zip(plan.logit_rows, token_ids, strict=True)):
            sequence = plan.sequences[index]
            if sequence.constraints is not None and token_id != NOT_FINITE and place not in faults:
                try:
                    sequence.constraints.advance(token_id)
                except ConstraintFailed as error:
                    faults[place] = str(error)
            if place in faults:
                token_id = token_ids[place] = NOT_FINITE
            if token_id == NOT_FINITE or token_id in sequence.common_stop_ids:
                sequence.stopped_generation = plan.generations[index]
                stops.append(index)
        return StepResult(plan, token_ids, 0.0, stops=tuple(stops), logprobs=output.logprobs, faults=faults)


def launch_step(
    forward_pass: IBatchedForwardPass,
    plan: Plan,
    batch: StepBatch,
    saves: Pairs = (),
    before: LaunchedStep | None = None,
) -> LaunchedStep:
    """Gives the device one plan, without the rows that no longer count, and before it the pages to save.

    Where the pass runs ahead `sample` is called without rows too: what it returns says when the step is computed, and
    so how far ahead the host is. What constrained rows may sample depends on the tokens of the step before, which
    therefore is waited for, while the device already computes this one's logits.
    """
    if saves:  # none where the pass has no places for them
        cast("IHostPages", forward_pass).save_pages(saves)
    kept = plan.live_rows()
    if len(kept) < len(plan):
        plan = plan.keep(kept)
        batch = keep_rows(batch, kept, plan)
    if not kept:
        return LaunchedStep(plan, None)
    try:
        logits = forward_pass.forward(batch)
        share_outputs(forward_pass, logits, plan)
        if not (plan.logit_rows or forward_pass.spec.runs_ahead):
            return LaunchedStep(plan, None)
        masks, faults = _masks(plan, forward_pass.spec.vocab_size, before)
        return LaunchedStep(plan, forward_pass.sample(logits, batch, masks), faults=faults)
    except Exception as error:  # noqa: BLE001 - as in `finish`
        _stop_rows(plan)  # now, for the next plan may be launched before this one is finished
        return LaunchedStep(plan, None, error)


def _stop_rows(plan: Plan) -> None:
    """Rows planned meanwhile build on what has failed."""
    for sequence, generation in zip(plan.sequences, plan.generations, strict=True):
        sequence.stopped_generation = generation


def _masks(plan: Plan, vocab_size: int, before: LaunchedStep | None) -> tuple[TokenMasks | None, dict[int, str]]:
    constrained = [
        (place, plan.ends[index] - sequence.num_prompt_tokens, sequence.constraints)
        for place, index in enumerate(plan.logit_rows)
        if (sequence := plan.sequences[index]).constraints is not None
    ]
    if not constrained:
        return None, {}
    if before is not None:
        before.is_finished.wait()
    return fill_masks(constrained, vocab_size)


def run_step(forward_pass: IBatchedForwardPass, plan: Plan, batch: StepBatch, saves: Pairs = ()) -> StepResult:
    """Runs one plan on the caller's thread."""
    return launch_step(forward_pass, plan, batch, saves).finish()
