"""`penstock bench scored-prompts`: a request as lm-eval sends it against the same request without scores.

lm-eval asks for the log probability of every token of context and continuation. A plain prefill computes the last
layer and the output layer for one token only, so the least ratio depends on the model's share of these.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from msgspec import Struct

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.load_generator.sending import ask_whole
from penstock.tools.bench.load_generator.stats import Aim
from penstock.tools.bench.load_generator.workload import Lengths, PlannedRequest, Workload
from penstock.tools.bench.options import (
    MEASUREMENT,
    AtLeastOne,
    BenchServerOptions,
    ReportOptions,
    SeededRounds,
)

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.tools.bench.load_generator.target import ServerAddress, Target

_SCORED = {"echo": True, "logprobs": 1}
_PAIRS_PER_ROUND = 3


@MEASUREMENT
@dataclass(frozen=True)
class ScoredPromptOptions:
    prompt_tokens: AtLeastOne = 1000
    """Tokens of each prompt."""


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """Seconds of each request, pair by pair."""

    prompt_tokens: int
    plain_s: list[float]
    scored_s: list[float]

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(scored / plain for scored, plain in zip(self.scored_s, self.plain_s, strict=True))

    def aim(self) -> Aim:
        return Aim("a scored prompt / a prefill of it", self.ratio, "at most", 1.2)


class _Logprobs(Struct):
    token_logprobs: list[float | None]


class _Choice(Struct):
    logprobs: _Logprobs | None = None


class _Answer(Struct):
    choices: list[_Choice]


def scored_prompts(
    *,
    options: ScoredPromptOptions = ScoredPromptOptions(),
    rounds: SeededRounds = SeededRounds(),
    server: BenchServerOptions = BenchServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run:
        with run.server(server) as own:
            found = uvloop.run(_measure(run, own.address, options.prompt_tokens, rounds))
        run.add("scored_prompts", found, scored_table(found), [found.aim()])
    return run.exit_status


async def _measure(
    run: MeasurementRun, address: ServerAddress, prompt_tokens: int, rounds: SeededRounds
) -> ScoredPrompts:
    found = ScoredPrompts(prompt_tokens, [], [])
    async with address.connect() as target:
        workload = Workload(Lengths(prompt_tokens, prompt_tokens), Lengths(1, 1), target.vocab_size)
        with run.status("plain and scored prompts take turns"):
            for index in range(-1, _PAIRS_PER_ROUND * rounds.rounds):  # the first pair warms up
                plain, scored = workload.draw(2, rounds.seed + index + 1)
                turns: list[tuple[PlannedRequest, dict[str, Any], list[float]]] = [
                    (plain, {}, found.plain_s),
                    (scored, _SCORED, found.scored_s),
                ]
                for request, fields, times_s in turns if index % 2 == 0 else reversed(turns):
                    lasted_s = await time_one(target, request, fields)
                    if index >= 0:
                        times_s.append(lasted_s)
    return found


async def time_one(target: Target, request: PlannedRequest, fields: dict[str, Any]) -> float:
    """Seconds until the whole answer. Raises BenchError if it lacks the scores that fields ask for."""
    data = target.encode(request, is_stream=False, fields=fields)
    started_s = time.perf_counter()
    body = await ask_whole(target, data)
    lasted_s = time.perf_counter() - started_s
    logprobs = msgspec.json.decode(body, type=_Answer).choices[0].logprobs
    num_scores = 0 if logprobs is None else len(logprobs.token_logprobs)
    expected = len(request.prompt) + request.output_tokens if fields else 0
    if num_scores != expected:
        raise BenchError(f"an answer has {num_scores} log probabilities instead of {expected}")
    return lasted_s


def scored_table(found: ScoredPrompts) -> Table:
    title = f"Prompts of {found.prompt_tokens:,} tokens, {len(found.plain_s)} of each kind in turns"
    table = make_table(title, "request", "ms, median", "by the prefill, median of pairs")
    table.add_row("prefill, one token", f"{1000 * statistics.median(found.plain_s):.0f}", "1 ×")
    table.add_row(
        "echo, logprobs 1, one token", f"{1000 * statistics.median(found.scored_s):.0f}", f"{found.ratio:.3f} ×"
    )
    return table
