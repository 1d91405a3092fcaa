"""One step on the device: launched from a plan, then finished with the tokens that it sampled."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from penstock.backend.buffers import share_outputs
from penstock.backend.engine.steps.batch_builder import keep_rows
from penstock.backend.engine.steps.vectors import Vectors, collect_vectors
from penstock.backend.forward_pass import (
    NOT_FINITE,
    IBatchedForwardPass,
    ISkippableOutput,
    PendingOutput,
    StepBatch,
    TokenLogprobs,
    positions_to_verify,
)
from penstock.backend.forward_pass.extensions import IHostPages
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.structured_output.constraints import SequenceConstraints
from penstock.backend.structured_output.late_masks import LateMasks, MaskedRow, StepMasks, fill_masks

PageSaves: TypeAlias = tuple[tuple[int, int], ...]
"""(page, host place) pairs."""


@dataclass(slots=True)
class StepResult:
    """The outcome of a step. plan has the rows that ran; token_ids has one entry per row of its logit_rows."""

    plan: Plan
    token_ids: list[int]
    step_s: float = 0.0
    error: Exception | None = None
    launch_s: float = 0.0
    """CPU time of the launch if the pass runs ahead, else 0."""
    ended_s: float = 0.0
    """When the step ended, in CLOCK_MONOTONIC; 0 if unknown."""
    stops: tuple[int, ...] = ()
    """Indices of rows whose token ended the sequence for all its subscribers at the time of sampling."""
    logprobs: TokenLogprobs | None = None
    """Its rows are places in the plan's logit_rows."""
    scored: TokenLogprobs | None = None
    """One entry for each position of the plan's scored, in order."""
    vectors: list[Vectors | None] = field(default_factory=list)
    """One for each of the plan's pooled_rows; None if one of its values is not finite."""
    faults: dict[int, str] = field(default_factory=dict)
    """Place in logit_rows → why the row's constraints cannot continue. The row's token is NOT_FINITE."""
    late: frozenset[int] = frozenset()
    """Indices of rows whose mask was not ready: they run again. Their token is NOT_FINITE."""
    accepted: dict[int, list[int]] = field(default_factory=dict)
    """Index of a row → the drafts that were sampled before its token. Rows without any are left out."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was given to the device: the rows that run, and their pending output or the error."""

    plan: Plan
    output: PendingOutput | None
    """None if there is nothing to wait for, or after an error."""
    error: Exception | None = None
    launch_s: float = 0.0
    faults: dict[int, str] = field(default_factory=dict)
    late: frozenset[int] = frozenset()
    """Places in logit_rows."""
    late_masks: LateMasks | None = None
    widths: Mapping[str, int] = field(default_factory=dict)
    """`PassSpec.pooled`."""
    is_finished: threading.Event = field(default_factory=threading.Event)
    """Set when the constraints of the sequences have advanced by the step's tokens."""

    def finish(self) -> StepResult:
        """Wait for the sampled tokens, or return the error. Marks sequences that stop, so that rows of later plans are
        dropped."""
        try:
            result = self._collect()
        except Exception as error:  # noqa: BLE001 - the engine fails the step's requests with it; others go on
            _stop_rows(self.plan)
            result = StepResult(self.plan, [], error=error)
        self.is_finished.set()
        return result

    def _collect(self) -> StepResult:
        plan, faults = self.plan, self.faults
        if self.error is not None:
            raise self.error
        if self.output is None:
            return StepResult(plan, [])
        # All rows have ended since the launch. Keys are needed of late ones, and of those that a later step fails.
        is_due = any(each.failed_generation == n for each, n in zip(plan.sequences, plan.generations, strict=True))
        if not (self.late or is_due or plan.live_rows()) and isinstance(self.output, ISkippableOutput):
            self.output.skip()
        output = self.output.wait()
        token_ids = output.token_ids.tolist()
        if len(token_ids) != len(plan.logit_rows):
            raise RuntimeError(f"the pass sampled {len(token_ids)} tokens for {len(plan.logit_rows)} rows")
        stops, accepted = [], dict[int, list[int]]()
        for place, (index, token_id) in enumerate(zip(plan.logit_rows, token_ids, strict=True)):
            sequence = plan.sequences[index]
            stop_ids = sequence.common_stop_ids  # once: another thread may replace it when a request joins
            if place in self.late:
                token_ids[place] = NOT_FINITE
                continue
            if place in faults:
                token_id = token_ids[place] = NOT_FINITE
            elif drafts := plan.drafts.get(sequence):
                sampled = [*drafts[: output.num_accepted[place]], token_id]
                ends = (n for n, token in enumerate(sampled) if token in stop_ids)
                *accepted[index], token_id = sampled[: next(ends, len(sampled)) + 1]
                token_ids[place] = token_id
            if sequence.constraints is not None and token_id != NOT_FINITE:
                self._advance(sequence.constraints, [*accepted.get(index, ()), token_id])
            if token_id == NOT_FINITE or token_id in stop_ids:
                _stop(sequence, plan.generations[index])
                stops.append(index)
        num_scored = 0 if output.scored is None else len(output.scored.chosen)
        if num_scored != (num_due := sum(end - first for first, end in plan.scored.values())):
            raise RuntimeError(f"the pass scored {num_scored} tokens of {num_due}")
        late = frozenset(plan.logit_rows[place] for place in self.late)
        return StepResult(
            plan,
            token_ids,
            stops=tuple(stops),
            logprobs=output.logprobs,
            scored=output.scored,
            vectors=collect_vectors(plan, self.widths, output.pooled),
            faults=faults,
            late=late,
            accepted={index: tokens for index, tokens in accepted.items() if tokens},
        )

    def _advance(self, constraints: SequenceConstraints, token_ids: list[int]) -> None:
        if self.late_masks is not None and constraints.is_late:
            self.late_masks.advance(constraints, token_ids)
        else:
            for token_id in token_ids:
                constraints.advance(token_id)
            constraints.make_guess()


def launch_step(
    forward_pass: IBatchedForwardPass,
    plan: Plan,
    batch: StepBatch,
    saves: PageSaves = (),
    before: LaunchedStep | None = None,
    late_masks: LateMasks | None = None,
) -> LaunchedStep:
    """Give the device one plan, without the rows that no longer count.

    Pages are saved to the host first. A pass that runs ahead gets a call of `sample` even without rows: its output says
    when the step is computed.

    Masks of constrained rows depend on the tokens of the step before, so that step is awaited while the device already
    computes this one's logits. A row whose mask is not ready by then runs without sampling, and later rows of it are
    dropped. A pass that keeps state cannot run a row again, so its steps wait for their masks.
    """
    if forward_pass.spec.state_bytes_per_sequence:
        late_masks = None
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
        if not (plan.logit_rows or plan.scored or plan.pooled_rows or forward_pass.spec.runs_ahead):
            return LaunchedStep(plan, None)
        masks, faults, late = _make_masks(plan, forward_pass.spec.vocab_size, before, late_masks)
        for place in late:
            index = plan.logit_rows[place]
            _drop_later_rows(plan.sequences[index], plan.generations[index])
        output = forward_pass.sample(logits, batch, masks)
        return LaunchedStep(
            plan, output, faults=faults, late=late, late_masks=late_masks, widths=forward_pass.spec.pooled
        )
    except Exception as error:  # noqa: BLE001 - as in `finish`
        _stop_rows(plan)  # here already: the next plan may be launched before this step is finished
        for sequence, generation in zip(plan.sequences, plan.generations, strict=True):
            sequence.failed_generation = generation
        return LaunchedStep(plan, None, error)


def _stop_rows(plan: Plan) -> None:
    """Make later plans drop their rows of these sequences: they build on a step that failed."""
    for sequence, generation in zip(plan.sequences, plan.generations, strict=True):
        _stop(sequence, generation)


def _stop(sequence: Sequence, generation: int) -> None:
    """Stop the sequence; nobody can join it any more."""
    _drop_later_rows(sequence, generation)
    sequence.final_generation = max(sequence.final_generation, generation)


def _drop_later_rows(sequence: Sequence, generation: int) -> None:
    """A step of an older generation may be finished after one of a newer generation has failed."""
    sequence.stopped_generation = max(sequence.stopped_generation, generation)


def _make_masks(plan: Plan, vocab_size: int, before: LaunchedStep | None, late_masks: LateMasks | None) -> StepMasks:
    rows = [(place, index, plan.sequences[index]) for place, index in enumerate(plan.logit_rows)]
    if all(sequence.constraints is None for _, _, sequence in rows):
        return StepMasks(None, {}, frozenset())
    drafts = [plan.drafts.get(sequence, []) for _, _, sequence in rows]
    positions = positions_to_verify(list(map(len, drafts)))
    constrained = [
        MaskedRow(place, plan.ends[index] - sequence.num_prompt_tokens, constraints, positions[place], drafts[place])
        for place, index, sequence in rows
        if (constraints := sequence.constraints) is not None
    ]
    if before is not None:
        before.is_finished.wait()
    return fill_masks(constrained, vocab_size, late_masks)
