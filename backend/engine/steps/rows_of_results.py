"""Orders what a step has sampled and scored by the rows of its plan."""

from __future__ import annotations

from penstock.backend.engine.steps.launched_step import StepResult
from penstock.backend.forward_pass import TokenLogprobs
from penstock.backend.scheduling.step_plan import NO_SAMPLE, Plan
from penstock.shm.messages import EventLogprobs


def tokens_by_row(result: StepResult) -> list[int]:
    """The sampled token of each row, or NO_SAMPLE."""
    plan = result.plan
    if len(plan.logit_rows) == len(plan):
        return result.token_ids
    token_ids = [NO_SAMPLE] * len(plan)
    for index, token_id in zip(plan.logit_rows, result.token_ids, strict=True):
        token_ids[index] = token_id
    return token_ids


def logprobs_by_row(plan: Plan, logprobs: TokenLogprobs) -> dict[int, EventLogprobs]:
    """Row → its log probabilities, with as many further tokens as its sequence asks for."""
    columns = zip(logprobs.rows.tolist(), logprobs.chosen.tolist(), logprobs.ranks.tolist(), strict=True)
    entries = {}
    for place, (row, chosen, rank) in enumerate(columns):
        index = plan.logit_rows[row]
        width = plan.sequences[index].sampling.num_reported
        top_ids, top = logprobs.top_ids[place, :width].tolist(), logprobs.top[place, :width].tolist()
        entries[index] = EventLogprobs(0, chosen, rank, tuple(top_ids), tuple(top))
    return entries


def scored_entries(scored: TokenLogprobs, part: slice, first: int, width: int) -> list[EventLogprobs]:
    """Entries for the prompt's tokens from index `first` on."""
    columns = (scored.chosen[part], scored.ranks[part], scored.top_ids[part, :width], scored.top[part, :width])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        EventLogprobs(index, chosen, rank, tuple(top_ids), tuple(top))
        for index, (chosen, rank, top_ids, top) in enumerate(rows, start=first)
    ]
