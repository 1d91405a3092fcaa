"""Compares a recording with its replay, request by request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from rich.table import Table

from penstock.commands.recorder.history import Life, sequences_of
from penstock.shm.messages import Finish, TextHeader
from penstock.shm.recording.events import Arrived, Ended, Joined, Left, Preempted, Started
from penstock.shm.recording.prompts import RecordedPrompt
from penstock.tools.replay.arrivals import Request

_FINISHED = (Finish.STOP, Finish.LENGTH)


@dataclass(slots=True)
class Account:
    """The numbers of one life."""

    shapes: list[tuple[int, int, int]]
    """Shape of each step: decoding rows, other rows, tokens."""
    num_joined: int = 0
    num_preempted: int = 0
    num_cached: int = 0
    """Tokens that were found when sequences first started."""
    finishes: Counter[int] = field(default_factory=Counter)
    first_s: dict[Request, float] = field(default_factory=dict)
    """Time from arrival to the end of the step that sampled the first token."""
    total_s: dict[Request, float] = field(default_factory=dict)
    """Time from arrival to the end, for requests that finished."""
    tokens: dict[Request, list[int]] = field(default_factory=dict)
    """The generated tokens of requests that finished, if all of them are recorded."""
    num_incomplete: int = 0
    """Requests that finished, but with only some tokens recorded."""

    @classmethod
    def of(cls, life: Life) -> Account:
        steps = [life.steps[number].plan for number in sorted(life.steps)]
        account = cls([(plan.num_decodes, plan.num_chunks, plan.num_tokens) for plan in steps])
        account._read(life)
        return account

    def _read(self, life: Life) -> None:
        arrived: dict[Request, tuple[float, Arrived]] = {}
        sequence_of: dict[Request, int] = {}
        final_tokens: dict[Request, int] = {}
        started: set[int] = set()
        for time_s, event in life.events:
            match event:
                case Arrived(frontend, request_id):
                    arrived[frontend, request_id] = time_s, event
                case Joined(frontend, request_id, sequence):
                    self.num_joined += 1
                    sequence_of[frontend, request_id] = sequence
                case Started(sequence):
                    sequence_of |= dict.fromkeys(event.requests, sequence)
                    self.num_cached += 0 if sequence in started else event.num_cached
                    started.add(sequence)
                case Preempted():
                    self.num_preempted += 1
                case Left(frontend, request_id, _, num_tokens):
                    final_tokens[frontend, request_id] = num_tokens
                case Ended(frontend, request_id, finish) if (frontend, request_id) in arrived:
                    self.finishes[finish] += 1
                    if finish in _FINISHED:
                        self.total_s[frontend, request_id] = time_s - arrived[frontend, request_id][0]
        rows_of = sequences_of(life.steps[number] for number in sorted(life.steps))
        for request, (time_s, event) in arrived.items():
            rows = rows_of.get(sequence_of.get(request, -1), [])
            first_s = (step.ended_s for step, row in rows if row.end >= event.num_tokens and step.ended_s is not None)
            if (sampled_s := next(first_s, None)) is not None:
                self.first_s[request] = max(0.0, sampled_s - time_s)
            if request in self.total_s:
                found = [(row.end, step.token_ids.get(row.slot, [])) for step, row in rows]
                sampled = {end + n: token for end, token_ids in found for n, token in enumerate(token_ids)}
                # One that joins late leaves a sequence that may be past its limit already.
                limit = event.num_prompt_tokens + event.max_tokens
                positions = range(event.num_tokens, min(limit, final_tokens.get(request, 0)))
                tokens = [sampled[position] for position in positions if position in sampled]
                if len(tokens) == len(positions):
                    self.tokens[request] = _up_to_stop(tokens, life.prompts.get(request))
                else:
                    self.num_incomplete += bool(tokens)


def _up_to_stop(tokens: list[int], prompt: RecordedPrompt | None) -> list[int]:
    """The tokens up to the request's first stop token, as it has joined a sequence that others let go on."""
    stop_ids: tuple[int, ...] = ()
    if prompt is not None and isinstance(prompt.message, TextHeader):
        stop_ids = prompt.message.stop_token_ids
    stop = next((index for index, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[: stop + 1]


@dataclass(frozen=True, slots=True)
class TokenComparison:
    num_same: int
    different: list[Request]


def compare_tokens(recorded: Account, replayed: Account) -> TokenComparison:
    """Compare the requests whose tokens are recorded. One that did not finish in the replay counts as different."""
    names = sorted(request for request, tokens in recorded.tokens.items() if tokens)
    different = [request for request in names if replayed.tokens.get(request) != recorded.tokens[request]]
    return TokenComparison(len(names) - len(different), different)


def comparison_table(recorded: Account, replayed: Account) -> Table:
    both = recorded.total_s.keys() & replayed.total_s.keys()
    table = Table(box=None)
    for name in ("", "recorded", "replayed"):
        table.add_column(name, justify="left" if not name else "right")
    for name, values in _rows(recorded, replayed, both):
        table.add_row(name, *values)
    return table


def _rows(recorded: Account, replayed: Account, both: set[Request]) -> list[tuple[str, list[str]]]:
    accounts = (recorded, replayed)
    firsts = [[account.first_s[name] for name in both if name in account.first_s] for account in accounts]
    totals = [[account.total_s[name] for name in both] for account in accounts]
    return [
        ("requests that finished", [f"{len(account.total_s):,}" for account in accounts]),
        ("requests that expired", [f"{account.finishes[Finish.EXPIRED]:,}" for account in accounts]),
        ("steps", [f"{len(account.shapes):,}" for account in accounts]),
        ("tokens in steps", [f"{sum(shape[2] for shape in account.shapes):,}" for account in accounts]),
        ("tokens found in the cache", [f"{account.num_cached:,}" for account in accounts]),
        ("requests coalesced", [f"{account.num_joined:,}" for account in accounts]),
        ("preemptions", [f"{account.num_preempted:,}" for account in accounts]),
        ("first token, ms, p50 / p99", [_percentiles(times_s) for times_s in firsts]),
        ("whole request, ms, p50 / p99", [_percentiles(times_s) for times_s in totals]),
    ]


def _percentiles(times_s: Sequence[float]) -> str:
    if len(times_s) < 2:
        return "".join(f"{1e3 * time_s:.1f}" for time_s in times_s)
    cuts = quantiles(times_s, n=100, method="inclusive")
    return f"{1e3 * cuts[49]:.1f} / {1e3 * cuts[98]:.1f}"
