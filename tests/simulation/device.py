"""The executor and its device without threads: a step starts and ends when the simulator decides."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.engine.steps.launched_step import launch_step
from penstock.tools.engine_rig import ThreadlessExecutor
from tests.simulation.chain_pass import ChainPass
from tests.simulation.rules import SimulatedLateMasks
from tests.simulation.violations import PlantedFault, Violation

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.engine.steps.launched_step import LaunchedStep, PageSaves, StepResult
    from penstock.backend.forward_pass import IBatchedForwardPass, StepBatch
    from penstock.backend.scheduling.step_plan import Plan, PlanRow
    from penstock.backend.sequences.sequence import Sequence
    from tests.simulation.chain_pass import Fault
    from tests.simulation.world import World


class _Awaited(threading.Event):
    """The end of a step. Waiting for it makes it happen."""

    def __init__(self, bring_about: Callable[[], None]) -> None:
        super().__init__()
        self._bring_about = bring_about

    def wait(self, timeout: float | None = None) -> bool:
        self._bring_about()
        return True


class SimulatedExecutor(ThreadlessExecutor):
    """Stands for the threads of an `Executor`. The main thread sees a result some time after it was computed."""

    def __init__(self, world: World, forward_pass: IBatchedForwardPass, capacity: int, page_size: int) -> None:
        super().__init__(capacity)
        self._world = world
        self._pass = forward_pass
        self._page_size = page_size
        self.late_masks = SimulatedLateMasks(world, forward_pass.spec.vocab_size)
        self._launched: deque[tuple[LaunchedStep, Fault | None]] = deque()
        self._before: LaunchedStep | None = None
        self._work: Callable[[], None] | None = None
        self._finished: tuple[StepResult, list[tuple[Sequence, int]]] | None = None
        """A finished step, and the stop marks that the main thread does not see yet."""
        self._starts_s: deque[float] = deque()
        """Start times of the launched steps whose results are not visible."""
        self._salts: dict[int, bytes] = {}  # page → tenant whose tokens it holds
        self._saved_salts: dict[int, bytes | None] = {}  # host place → tenant
        self.faulty: dict[tuple[Sequence, int], bool] = {}
        """(sequence, generation) → whether its logits were bad (True) or it failed in a step of its own (False). The
        first of the two counts, because it ends the sequence."""

    @property
    def has_work(self) -> bool:
        """Work of `call` is not done."""
        return self._work is not None

    def running_s(self) -> float:
        return self._world.now_s - self._starts_s[0] if self._starts_s else 0.0

    def launch(self, plan: Plan, batch: StepBatch, saves: PageSaves) -> None:
        if not plan or self._num_in_flight > self._capacity:
            raise Violation(f"a plan of {len(plan)} rows beside {self._num_in_flight} in flight")
        super().launch(plan, batch, saves)
        rows = list(plan.rows())
        self._world.judge.note_plan(rows)
        for row in rows:
            if (copy := plan.page_copies.get(row.sequence)) is not None:
                self._world.judge.judge_copy(copy[0], row.start % self._page_size)
            self._world.judge.judge_restores(plan.page_restores.get(row.sequence, ()))
        self._world.advance_device()

    def call(self, work: Callable[[], None]) -> None:
        if self.is_busy or self._work is not None:
            raise Violation("work beside a step or other work")
        self._work = work

    def results(self) -> list[StepResult]:
        self._world.advance_device()
        return super().results()

    def advance(self) -> bool:
        """Advance one of the threads: start a step, finish one, or make a result visible. False if there is nothing to
        do."""
        can_do: list[Callable[[], None]] = []
        if self._work is not None:
            can_do.append(self._do_work)
        elif self._finished is not None:
            can_do.append(self._publish)
        elif self._launched:
            can_do.append(self._finish)
        if self._plans and (self._pass.spec.runs_ahead or not can_do):
            can_do.append(self._start)
        if not can_do:
            return False
        (can_do[0] if len(can_do) == 1 else self._world.rng.choice(can_do))()
        return True

    def _do_work(self) -> None:
        if self._work is not None:
            self._work()
            self._work = None

    def _catch_up(self) -> None:
        while self._finished is not None or self._launched:
            self._world.covered["awaited for its constraints"] += 1
            if self._finished is not None:
                self._publish()
            else:
                self._finish()

    def _start(self) -> None:
        planned, batch, saves = self._plans.popleft()
        self._starts_s.append(self._world.now_s)
        self._world.covered["launched ahead"] += bool(self._launched)
        fault = None
        if isinstance(self._pass, ChainPass):
            fault = self._pass.fault = self._world.draw_fault([planned.sequences[row] for row in planned.live_rows()])
        step = launch_step(self._pass, planned, batch, saves, self._before, self.late_masks)
        self._world.covered["saved for a step without rows"] += bool(saves) and not step.plan
        self._world.covered["rows bound late"] += len(planned) - len(step.plan)
        if isinstance(step.error, Violation):
            raise step.error
        self._saved_salts |= {place: self._salts.get(page) for page, place in saves}
        self._note_copies(step.plan)
        for row in step.plan.rows():
            self._judge(row, len(step.plan.drafts.get(row.sequence, ())))
        self._launched.append((step, fault))
        self._before = replace(step, is_finished=_Awaited(self._catch_up))
        if not self._pass.spec.runs_ahead:
            self._finish()

    def _finish(self) -> None:
        step, fault = self._launched.popleft()
        before = [(s, s.stopped_generation, s.final_generation) for s in step.plan.sequences]
        result = step.finish()
        rows, error = list(result.plan.rows()), result.error
        self._world.covered["drafts accepted"] += bool(result.accepted)
        self._world.covered["drafts rejected"] += len(result.plan.drafts) > len(result.accepted)
        is_planted = isinstance(error, PlantedFault) or (fault is not None and fault.kind == "miscount")
        if error is not None and not is_planted:
            raise error
        if error is not None and len(rows) == 1:
            self.faulty.setdefault((rows[0].sequence, rows[0].generation), False)
        for place, token_id in enumerate(result.token_ids):
            index = result.plan.logit_rows[place]
            row = rows[index]
            if token_id < 0 and place not in result.faults and index not in result.late:
                self.faulty.setdefault((row.sequence, row.generation), True)
        for index, vectors in zip(result.plan.pooled_rows, result.vectors, strict=False):
            if vectors is None:
                self.faulty.setdefault((rows[index].sequence, rows[index].generation), True)
        generations, place = dict(zip(result.plan.sequences, result.plan.generations, strict=True)), 0
        for sequence, (first, end) in result.plan.scored.items():
            if result.scored is not None and np.isnan(result.scored.chosen[place : place + end - first]).any():
                self.faulty.setdefault((sequence, generations[sequence]), True)
            place += end - first
        # The thread has compared, but the main thread does not see it yet: others may subscribe now.
        stopped = [(s, s.final_generation) for s, _, final in before if s.final_generation != final]
        for sequence, generation, final in before:
            sequence.stopped_generation, sequence.final_generation = generation, final
        self._finished = result, stopped
        if self._world.log is not None:
            spans = [(row.start, row.end, row.sequence.order) for row in rows]
            self._world.log(f"  step of (start, end, order) {spans} gives {result.token_ids or error!r}")

    def _publish(self) -> None:
        if self._finished is None:
            raise Violation("there is no result to publish")
        result, stopped = self._finished
        for sequence, generation in stopped:
            sequence.stopped_generation = max(sequence.stopped_generation, generation)
            sequence.final_generation = max(sequence.final_generation, generation)
        step_s = self._world.now_s - self._starts_s.popleft()
        if self._starts_s:
            self._starts_s[0] = self._world.now_s
        # The reported duration may mislead about the next steps.
        self._results.append(replace(result, step_s=self._world.rng.choice((0.0, 9.0, step_s))))
        self._finished = None

    def _note_copies(self, plan: Plan) -> None:
        for sequence, restores in plan.page_restores.items():
            if any(self._saved_salts[place] != sequence.salt for place, _ in restores):
                raise Violation("a row restores a page that its tenant did not write")
            self._salts |= dict.fromkeys([page for _, page in restores], sequence.salt)
        for sequence, (source, destination) in plan.page_copies.items():
            self._world.covered["page copied"] += 1
            if self._salts.get(source) != sequence.salt:
                raise Violation("a row copies a page that its tenant did not write")
            self._salts[destination] = sequence.salt

    def _judge(self, row: PlanRow, num_drafts: int) -> None:
        """The row has a subscriber, and it reads pages of its own tenant only."""
        sequence, size = row.sequence, self._page_size
        listeners = self._world.backend.link.open
        if sequence.ended or not any((s.frontend, s.request_id) in listeners for s in sequence.subscribers):
            raise Violation("a row without a subscriber runs")
        first_written = row.start // size
        for page in sequence.kv.pages[sequence.kv.passed[0] : -(-row.start // size)]:
            if self._salts.get(page) != sequence.salt:
                raise Violation("a row reads a page that its tenant did not write")
        for page in sequence.kv.pages[first_written : -(-(row.end + num_drafts) // size)]:
            self._salts[page] = sequence.salt
