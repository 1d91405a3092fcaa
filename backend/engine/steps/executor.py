"""The thread that owns the device: it loads the forward pass and runs the steps it is given, in order."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from penstock.backend.engine.steps.launched_step import LaunchedStep, PageSaves, StepResult, launch_step
from penstock.backend.forward_pass import DeviceLost, IBatchedForwardPass, StepBatch
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.structured_output.late_masks import LateMasks

SWITCH_INTERVAL_S = 0.0001
"""For `sys.setswitchinterval`, where an engine runs: its threads, on which the device waits, soon get the interpreter's
lock."""
_CLOSE_TIMEOUT_S = 10.0


class ExecutorFailed(Exception):
    """The device's thread has died, hangs, or fails every step. The process must be restarted."""


class Executor:
    """Runs one step at a time and holds at most `capacity` plans ready behind it.

    Rows are bound late: rows whose sequence ended or was preempted after planning are dropped when the step is
    launched. `wake_fd` becomes readable when a result is available.

    A pass that runs ahead gets the plans as they come, and a second thread waits for their results.
    """

    def __init__(self, capacity: int, turns: AbstractContextManager[None] = nullcontext()) -> None:  # noqa: B008 - it has no state
        """turns: entered while a step is launched: as long as it runs, unless the pass runs ahead."""
        self._turns = turns
        self._capacity = capacity
        self._plans: queue.SimpleQueue[tuple[Plan, StepBatch, PageSaves] | Callable[[], None] | None]
        self._plans = queue.SimpleQueue()
        self._results: deque[StepResult] = deque()
        self._num_in_flight = 0
        self._launched: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()
        self._step_starts_s: deque[float] = deque()
        """Start times of the launched steps that are not finished."""
        self._call_began_s: float | None = None
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._pass: IBatchedForwardPass | None = None
        self._load_error: BaseException | None = None
        self._loaded = threading.Event()
        self._closing = False
        self._fatal: BaseException | None = None

    def start(self, load: Callable[[], IBatchedForwardPass]) -> IBatchedForwardPass:
        """Load the pass on the thread that will run it, and wait until it is loaded. Raises what load raises."""
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
        """One more plan may be launched. The limit is one running step and `capacity` plans behind it."""
        return self._num_in_flight <= self._capacity

    @property
    def is_busy(self) -> bool:
        return self._num_in_flight > 0

    def running_s(self) -> float:
        """Seconds since the running step, or work of `call`, began; 0 when none runs."""
        if (began_s := self._call_began_s) is not None:
            return time.monotonic() - began_s
        try:
            return time.monotonic() - self._step_starts_s[0]
        except IndexError:
            return 0.0

    def launch(self, plan: Plan, batch: StepBatch, saves: PageSaves) -> None:
        """Launch a step.

        saves are (page, host place) pairs. They are copied before the step, even if none of its rows is left by then.
        """
        self._num_in_flight += 1
        self._plans.put((plan, batch, saves))

    def call(self, work: Callable[[], None]) -> None:
        """Do this on the pass's thread, after the steps that were launched before it. An error is fatal."""
        self._plans.put(work)

    def results(self) -> list[StepResult]:
        """Results since the last call, in launch order. Raises ExecutorFailed if the thread has died."""
        if self._fatal is not None:
            raise ExecutorFailed(_why_ended(self._fatal)) from self._fatal
        results = []
        while self._results:
            results.append(self._results.popleft())
        self._num_in_flight -= len(results)
        return results

    def clear_wake(self) -> None:
        """Call before `results`: a result that arrives in between wakes the loop again."""
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return

    def wake(self) -> None:
        """Safe from any thread and from a signal handler."""
        os.eventfd_write(self.wake_fd, 1)

    def fail(self, reason: str) -> None:
        """Make `results` raise ExecutorFailed, although the thread still runs. Safe from any thread."""
        self._fatal = ExecutorFailed(reason)
        self.wake()

    def close(self) -> None:
        """End the thread after the running step, and close the pass. wake_fd stays open: a late signal may write to it.

        Raises ExecutorFailed if the thread has died or does not end in time.
        """
        self._closing = True
        self._plans.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                raise ExecutorFailed(f"the running step did not end within {_CLOSE_TIMEOUT_S:g} s")
        if self._fatal is not None:
            raise ExecutorFailed(_why_ended(self._fatal)) from self._fatal

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
        except BaseException as error:  # noqa: BLE001 - raised in the main thread, by results() or close()
            self._fatal = error
            self.wake()

    def _launch_plans(self, forward_pass: IBatchedForwardPass) -> Iterator[LaunchedStep]:
        """Launch the plans as they come, until the executor is closed."""
        before: LaunchedStep | None = None
        late_masks = LateMasks(forward_pass.spec.vocab_size, self.wake)
        while (planned := self._plans.get()) is not None:
            if callable(planned):
                with self._turns:
                    self._call_began_s = time.monotonic()
                    planned()
                    self._call_began_s = None
            elif not self._closing:
                runs_ahead = forward_pass.spec.runs_ahead
                with self._turns:
                    self._step_starts_s.append(time.monotonic())
                    began_s = time.thread_time() if runs_ahead else 0.0  # a system call
                    before = launch_step(forward_pass, *planned, before, late_masks)
                if runs_ahead:
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
        if self._step_starts_s:  # it was launched while this one ran, and begins now
            self._step_starts_s[0] = now_s
        finished.step_s, finished.launch_s, finished.ended_s = now_s - started_s, step.launch_s, now_s
        self._results.append(finished)
        self.wake()


def _why_ended(fatal: BaseException) -> str:
    if isinstance(fatal, ExecutorFailed):
        return str(fatal)
    if isinstance(fatal, DeviceLost):  # while pages were saved, which belongs to no request
        return f"the device is lost: {fatal}"
    return "the thread that runs the forward pass has died"
