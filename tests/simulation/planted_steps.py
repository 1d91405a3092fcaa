"""Bugs to plant in how steps are launched, finished and applied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.backend.engine.loop import Engine
from penstock.backend.engine.steps import launched_step as step_module
from penstock.backend.engine.steps.launched_step import StepResult
from penstock.backend.engine.steps.step_timing import StepTiming
from penstock.backend.forward_pass import NOT_FINITE
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.structured_output.constraints import SequenceConstraints
from penstock.backend.structured_output.late_masks import LateMasks
from tests.simulation import device as device_module
from tests.simulation.planting import Plant, wrap


def _saves_go_with_rows(launch: Any, forward_pass: Any, plan: Plan, batch: Any, saves: Any, *further: Any) -> Any:
    return launch(forward_pass, plan, batch, saves if plan.live_rows() else (), *further)


def _saves_go_with_the_plan(launch: Any, engine: Engine, *planned: Any) -> None:
    saves = engine._scheduler.take_saves()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._scheduler, "take_saves", lambda: saves)
        launch(engine, *planned)


def _saves_come_after_their_step(
    launch: Any, forward_pass: Any, plan: Plan, batch: Any, saves: Any, *further: Any
) -> Any:
    step = launch(forward_pass, plan, batch, (), *further)
    if saves:
        forward_pass.save_pages(saves)
    return step


def _failed_steps_count_as_running(note_result: Any, step_timing: StepTiming, num_tokens: int, *times: float) -> None:
    if num_tokens:
        note_result(step_timing, num_tokens, *times)


def _a_failed_step_fails_them_all(_: Any, engine: Engine, plan: Plan, error: Exception) -> None:
    for row in plan.rows():
        if row.sequence.generation == row.generation:
            engine._delivery.fail(row.sequence)


def _a_bad_row_spoils_the_step(apply: Any, engine: Engine, result: StepResult) -> None:
    if NOT_FINITE in result.token_ids:
        result = replace(result, token_ids=[NOT_FINITE] * len(result.token_ids))
    apply(engine, result)


def _tokens_of_failed_constraints_are_told(apply: Any, engine: Engine, result: StepResult) -> None:
    tokens = [0 if place in result.faults else token for place, token in enumerate(result.token_ids)]
    apply(engine, replace(result, token_ids=tokens))


def _scores_of_dropped_rows_stay(keep: Any, batch: Any, *args: Any) -> Any:
    return replace(keep(batch, *args), scored=batch.scored)


def _takes_in_nothing(_: Any, late_masks: LateMasks, constraints: SequenceConstraints, _token_id: int) -> None:
    late_masks._begin(constraints, (), constraints.num_tokens + 1)


STEP_BUGS: dict[str, Plant] = {
    "constraints are not rewound": wrap(SequenceConstraints, "rewind", lambda *_: None),
    "a token is delivered after its constraints failed": wrap(Engine, "_apply", _tokens_of_failed_constraints_are_told),
    "masks do not wait for the previous step": wrap(
        step_module, "_make_masks", lambda masks, plan, vocab_size, _before, late: masks(plan, vocab_size, None, late)
    ),
    "tokens sampled without their mask count": wrap(
        step_module, "_make_masks", lambda masks, *args: masks(*args)._replace(late=frozenset())
    ),
    "late masks are those of the token before": wrap(LateMasks, "advance", _takes_in_nothing),
    "a state goes on after a rewind": wrap(
        Scheduler, "rewind", lambda _, _scheduler, sequence, num_computed: sequence.rewind(num_computed)
    ),
    "rows that build on a failed step are launched": wrap(step_module, "_stop_rows", lambda *_: None),
    "scored tokens stay where they were when a row is dropped": wrap(
        step_module, "keep_rows", _scores_of_dropped_rows_stay
    ),
    "the last token of a prompt is not scored": lambda patch: patch.setattr(
        Sequence, "num_to_score", property(lambda sequence: max(0, sequence.num_prompt_tokens - 2))
    ),
    "a scored prompt begins with cached tokens": lambda patch: patch.setattr(
        Sequence, "num_reusable", property(lambda sequence: len(sequence.tokens) - 1)
    ),
    "what was scored before a preemption is scored again": wrap(
        Sequence, "restart", lambda restart, sequence: (restart(sequence), setattr(sequence, "num_scored", 0))
    ),
    "embeddings stay behind when a row before theirs is dropped": wrap(
        step_module,
        "keep_rows",
        lambda keep, batch, *args: replace(keep(batch, *args), embeddings=batch.embeddings),
    ),
    "page saves are lost with a step without rows": wrap(device_module, "launch_step", _saves_go_with_rows),
    "page saves are lost with a plan that cannot be built": wrap(Engine, "_launch", _saves_go_with_the_plan),
    "pages are saved after the step that overwrites them": wrap(
        device_module, "launch_step", _saves_come_after_their_step
    ),
    "the next plan waits for a failed step": wrap(StepTiming, "note_result", _failed_steps_count_as_running),
    "a failed step fails all its requests": wrap(Engine, "_apply_failure", _a_failed_step_fails_them_all),
    "rows are bound when planned, not when launched": lambda patch: patch.setattr(
        Plan, "live_rows", lambda plan: list(range(len(plan)))
    ),
    "bad logits fail the whole step": wrap(Engine, "_apply", _a_bad_row_spoils_the_step),
}
