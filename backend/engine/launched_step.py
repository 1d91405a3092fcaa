"""One step on the device: launched from a plan, then finished with the tokens that it sampled."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, cast

from penstock.backend.buffers.shared_outputs import share_outputs
from penstock.backend.engine.batch_builder import keep_rows
from penstock.backend.forward_pass import NOT_FINITE
from penstock.backend.structured_output.constraints import ConstraintFailed
from penstock.backend.structured_output.masks import fill_masks

if TYPE_CHECKING:
    from penstock.backend.forward_pass import (
        IBatchedForwardPass,
        IHostPages,
        PendingOutput,
        StepBatch,
        TokenLogprobs,
        TokenMasks,
    )
    from penstock.backend.scheduling.step_plan import Plan

    PageSaves: TypeAlias = tuple[tuple[int, int], ...]
    """(page, host place) pairs."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step. plan has the rows that ran; token_ids has one entry per row of its logit_rows."""

    plan: Plan
    token_ids: list[int]
    step_s: float
    error: Exception | None = None
    launch_s: float = 0.0
    """CPU time of the launch if the pass runs ahead, else 0."""
    stops: tuple[int, ...] = ()
    """Indices of rows whose token ended the sequence for all subscribers that it had when the token was sampled."""
    logprobs: TokenLogprobs | None = None
    """Its rows are places in the plan's logit_rows."""
    faults: dict[int, str] = field(default_factory=dict)
    """Place in logit_rows → why the row's constraints cannot go on. The row's token is NOT_FINITE."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was given to the device: the rows that run, and their pending output or the error."""

    plan: Plan
    output: PendingOutput | None
    """None if there is nothing to wait for, or after an error."""
    error: Exception | None = None
    launch_s: float = 0.0
    faults: dict[int, str] = field(default_factory=dict)
    is_finished: threading.Event = field(default_factory=threading.Event)
    """Set when the constraints of the sequences have advanced by the step's tokens."""

    def finish(self) -> StepResult:
        """Wait for the sampled tokens, or return the error. Marks sequences that stop, so that rows of later plans are
        dropped."""
        try:
            result = self._collect()
        except Exception as error:  # noqa: BLE001 - the engine fails the step's requests with it; others go on
            _stop_rows(self.plan)
            result = StepResult(self.plan, [], 0.0, error)
        self.is_finished.set()
        return result

    def _collect(self) -> StepResult:
        plan, faults = self.plan, self.faults
        if self.error is not None:
            raise self.error
        if self.output is None:
            return StepResult(plan, [], 0.0)
        output = self.output.wait()
        token_ids = output.token_ids.tolist()
        if len(token_ids) != len(plan.logit_rows):
            raise RuntimeError(f"the pass sampled {len(token_ids)} tokens for {len(plan.logit_rows)} rows")
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
    saves: PageSaves = (),
    before: LaunchedStep | None = None,
) -> LaunchedStep:
    """Give the device one plan, without the rows that no longer count. Pages are saved to the host first.

    A pass that runs ahead gets a call of `sample` without rows too: its output says when the step is computed. Masks of
    constrained rows depend on the tokens of the step before, so that step is awaited while the device already computes
    this one's logits.
    """
    if saves:  # empty unless the pass is an IHostPages
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
        masks, faults = _make_masks(plan, forward_pass.spec.vocab_size, before)
        return LaunchedStep(plan, forward_pass.sample(logits, batch, masks), faults=faults)
    except Exception as error:  # noqa: BLE001 - as in `finish`
        _stop_rows(plan)  # here already: the next plan may be launched before this step is finished
        return LaunchedStep(plan, None, error)


def _stop_rows(plan: Plan) -> None:
    """Have later plans drop their rows of these sequences: they build on a step that failed."""
    for sequence, generation in zip(plan.sequences, plan.generations, strict=True):
        sequence.stopped_generation = generation


def _make_masks(plan: Plan, vocab_size: int, before: LaunchedStep | None) -> tuple[TokenMasks | None, dict[int, str]]:
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


def run_step(forward_pass: IBatchedForwardPass, plan: Plan, batch: StepBatch, saves: PageSaves = ()) -> StepResult:
    """Run one plan on the caller's thread."""
    return launch_step(forward_pass, plan, batch, saves).finish()
