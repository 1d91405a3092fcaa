"""The executor and its device without a thread: a step starts and ends when the simulator says so."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from backend.executor import run_step
from tests.simulation.models import ChainPass, PlantedFault, Violation

if TYPE_CHECKING:
    from backend.executor import StepResult
    from backend.forward_pass import IBatchedForwardPass, StepBatch
    from backend.plan import Plan, Row
    from backend.sequence import Sequence
    from tests.simulation.world import World


class SimulatedExecutor:
    """Stands where Executor stands. What a step tells the main thread becomes visible only as the step ends."""

    wake_fd = -1

    def __init__(self, world: World, forward_pass: IBatchedForwardPass, capacity: int, page_size: int) -> None:
        self._world = world
        self._pass = forward_pass
        self._capacity = capacity
        self._page_size = page_size
        self._plans: deque[tuple[Plan, StepBatch]] = deque()
        self._running: tuple[StepResult, list[tuple[Sequence, int]]] | None = None
        self._results: list[StepResult] = []
        self._num_in_flight = 0
        self._salts: dict[int, bytes] = {}  # of each page, whose tokens it holds
        self.faulty: dict[tuple[Sequence, int], bool] = {}
        """(sequence, generation) of rows that failed in a step of their own, False, or whose logits were bad, True."""

    @property
    def has_room(self) -> bool:
        return self._num_in_flight <= self._capacity

    @property
    def is_busy(self) -> bool:
        return self._num_in_flight > 0

    def running_s(self) -> float:
        return 0.0

    def clear_wake(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def launch(self, plan: Plan, batch: StepBatch) -> None:
        if not plan or self._num_in_flight > self._capacity:
            raise Violation(f"a plan of {len(plan)} rows beside {self._num_in_flight} in flight")
        self._num_in_flight += 1
        self._plans.append((plan, batch))
        rows = list(plan.rows())
        self._world.note_plan(rows)
        for row in rows:
            if (copy := plan.page_copies.get(row.sequence)) is not None:
                self._world.judge_copy(copy[0], row.start % self._page_size)
        self._world.device_goes_on()

    def results(self) -> list[StepResult]:
        self._world.device_goes_on()
        results, self._results = self._results, []
        self._num_in_flight -= len(results)
        return results

    def advance(self) -> bool:
        """The running step ends, or the next one starts; False when there is nothing to do."""
        if self._running is not None:
            result, stopped = self._running
            for sequence, generation in stopped:
                sequence.stopped_generation = generation
            self._results.append(result)
            self._running = None
        elif self._plans:
            self._start(*self._plans.popleft())
        else:
            return False
        return True

    def _start(self, planned: Plan, batch: StepBatch) -> None:
        if isinstance(self._pass, ChainPass):
            self._pass.fault = self._world.draw_fault([planned.sequences[row] for row in planned.live_rows()])
        before = [(sequence, sequence.stopped_generation) for sequence in planned.sequences]
        result = run_step(self._pass, planned, batch)
        rows, error = list(result.plan.rows()), result.error
        self._world.covered["rows bound late"] += len(planned) - len(rows)
        if isinstance(error, Violation) or (error is not None and not self._is_planted(error)):
            raise error
        tokens = iter(result.token_ids)
        self._note_copies(result.plan)
        for row in rows:
            self._judge(row)
            if (error is not None and len(rows) == 1) or (error is None and row.samples and next(tokens) < 0):
                self.faulty[row.sequence, row.generation] = error is None
        # The executor's thread has compared, and not yet said what it found: others may subscribe just now.
        stopped = [(s, s.stopped_generation) for s, generation in before if s.stopped_generation != generation]
        for sequence, generation in before:
            sequence.stopped_generation = generation
        self._running = result, stopped
        if self._world.log is not None:
            told = [(row.start, row.end, row.sequence.order) for row in rows]
            self._world.log(f"  step of (start, end, order) {told} brings {result.token_ids or error!r}")

    def _is_planted(self, error: Exception) -> bool:
        fault = self._pass.fault if isinstance(self._pass, ChainPass) else None
        return isinstance(error, PlantedFault) or (fault is not None and fault.kind == "miscount")

    def _note_copies(self, plan: Plan) -> None:
        for sequence, (source, destination) in plan.page_copies.items():
            self._world.covered["page copied"] += 1
            if self._salts.get(source) != sequence.salt:
                raise Violation("a row copies what another tenant wrote, or what nobody did")
            self._salts[destination] = sequence.salt

    def _judge(self, row: Row) -> None:
        """Somebody wants what the row computes, and what it reads is of its own tenant."""
        sequence, size = row.sequence, self._page_size
        listeners = self._world.backend.link.open
        if sequence.ended or not any((s.frontend, s.request_id) in listeners for s in sequence.subscribers):
            raise Violation("a row runs to which nobody listens")
        first_written = row.start // size
        for page in sequence.pages[: -(-row.start // size)]:
            if self._salts.get(page) != sequence.salt:
                raise Violation("a row reads what another tenant wrote, or what nobody did")
        for page in sequence.pages[first_written : -(-row.end // size)]:
            self._salts[page] = sequence.salt
