"""Results of a comparison of servers: figures of each, ratios of the rounds, tables, and warnings about doubtful
figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from penstock.tools.bench.harness.foreign_cpu import Disturbance, WatchedRound
from penstock.tools.bench.harness.report import make_table, ms

PENSTOCK = "penstock"
"""Name of our own server among the others."""
_TOKEN_TOLERANCE = 0.02
"""Numbers of tokens may differ between servers by this share: one may begin each prompt with a token of its own."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The compared figures of a round. A figure is None if no answer had such an event."""

    output_tokens_per_s: float | None
    ttft_p50_ms: float | None
    itl_p50_ms: float | None

    @classmethod
    def of(cls, item: WatchedRound) -> Figures:
        summary = item.summary
        return cls(summary.output_tokens_per_s, summary.ttft_ms.p50, summary.itl_ms.p50)

    def values(self) -> tuple[float | None, ...]:
        return self.output_tokens_per_s, self.ttft_p50_ms, self.itl_p50_ms

    def over(self, other: Figures) -> Figures:
        pairs = zip(self.values(), other.values(), strict=True)
        return Figures(*(a / b if a is not None and b else None for a, b in pairs))

    @classmethod
    def medians(cls, items: Sequence[Figures]) -> Figures:
        columns = zip(*(item.values() for item in items), strict=True)
        return cls(*map(_median, columns))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


Rounds = dict[str, list[WatchedRound]]
"""By server."""


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One server under one load."""

    server: str
    concurrency: int
    medians: Figures
    ratios: Figures | None
    """Penstock / this server: medians of the rounds' ratios. None for Penstock itself."""
    num_disturbed: int
    """Rounds that were still disturbed in their last repetition."""
    rounds: list[WatchedRound]


def compared_rows(concurrency: int, found: Rounds, disturbance: Disturbance) -> list[ComparedRow]:
    figures = {name: [Figures.of(item) for item in rounds] for name, rounds in found.items()}
    rows = []
    for name, rounds in found.items():
        pairs = zip(figures[PENSTOCK], figures[name], strict=True)
        ratios = Figures.medians([ours.over(theirs) for ours, theirs in pairs]) if name != PENSTOCK else None
        num_disturbed = sum(map(disturbance.has_disturbed, rounds))
        rows.append(ComparedRow(name, concurrency, Figures.medians(figures[name]), ratios, num_disturbed, rounds))
    return rows


def compare_table(rows: Sequence[ComparedRow]) -> Table:
    columns = ["load", "server", "output\ntok/s", "TTFT ms\np50", "ITL ms\np50", "tok/\nevent"]
    columns += [f"ratio\n{name}" for name in ("tok/s", "TTFT", "ITL")]
    columns += ["sent\nagain", "er-\nrors", "foreign\ncores", "re-\npeated"]
    table = make_table("Medians of the rounds; ratios are penstock / the server", *columns)
    for row in rows:
        summaries = [item.summary for item in row.rounds]
        tokens_per_s, ttft_ms, itl_ms = row.medians.values()
        ratios = row.ratios.values() if row.ratios is not None else (None, None, None)
        table.add_row(
            f"c={row.concurrency}" if row.ratios is None else "",
            row.server,
            f"{tokens_per_s:,.0f}",
            ms(ttft_ms),
            ms(itl_ms),
            f"{statistics.median(item.output_tokens / max(item.events, 1) for item in summaries):.1f}",
            *("" if row.ratios is None else "–" if ratio is None else f"{ratio:.2f} ×" for ratio in ratios),
            str(sum(item.sent_again for item in summaries)),
            str(sum(item.failed for item in summaries)),
            f"{max(item.foreign_cores for item in row.rounds):.2f}",
            str(sum(item.attempts - 1 for item in row.rounds)),
        )
    return table


def warnings(rows: Sequence[ComparedRow]) -> Iterator[str]:
    """Warn about doubtful figures. Each load begins with the row of Penstock."""
    ours = (0.0, 0.0)
    for row in rows:
        name = f"c={row.concurrency}, {row.server}"
        if row.num_disturbed:
            yield f"{name}: {row.num_disturbed} of {len(row.rounds)} rounds were disturbed in every attempt"
        error = next((item.summary.first_error for item in row.rounds if item.summary.first_error), "")
        if error:
            yield f"{name}: first error: {error}"
        tokens = _tokens_per_request(row)
        if row.server == PENSTOCK:
            ours = tokens
        elif not error and any(abs(a - b) > _TOKEN_TOLERANCE * b for a, b in zip(tokens, ours, strict=True)):
            theirs, reference = (f"{prompt:.0f} prompt and {output:.0f} output" for prompt, output in (tokens, ours))
            yield f"{name}: {theirs} tokens a request, but {reference} tokens with {PENSTOCK}"


def _tokens_per_request(row: ComparedRow) -> tuple[float, float]:
    """Return the mean lengths of prompt and answer."""
    summaries = [item.summary for item in row.rounds]
    num_requests = sum(item.requests for item in summaries)
    num_prompt_tokens = sum(item.prompt_tokens for item in summaries)
    return num_prompt_tokens / num_requests, sum(item.output_tokens for item in summaries) / num_requests
