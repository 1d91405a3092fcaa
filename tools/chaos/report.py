"""The results of a run: for people on the terminal and in Markdown, for machines in JSON."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

import penstock
from penstock.tools.bench.harness.machine import MachineDescription, this_machine
from penstock.tools.chaos.census import Growth, ProcessState
from penstock.tools.chaos.errors import ChaosError
from penstock.tools.chaos.ledger import DoneFault, Ending, EndKind, Ledger


@dataclass
class Outcome:
    """Everything that a run recorded."""

    ledger: Ledger
    model: str = ""
    num_planned_drops: int = 0
    lasted_s: float = 0.0
    faults: list[DoneFault] = field(default_factory=list)
    resumed: int = 0
    """Streams that another backend continued, as far as it was read before the next one died."""
    longest_settle_s: float = 0.0
    longest_request: Ending | None = None
    """The slowest request whose answer was complete and right."""
    started_s: float = 0.0
    """time.monotonic()."""
    growths: list[Growth] = field(default_factory=list)
    unmeasured_roles: list[str] = field(default_factory=list)
    """Roles of which no process was measured twice: each was replaced."""
    states: list[ProcessState] = field(default_factory=list)
    """The last census."""
    base_states: list[ProcessState] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """The result of a run, ready to be written."""

    command: str
    commit: str
    machine: MachineDescription
    model: str
    lasted_s: float
    requests: int
    ends: dict[str, int]
    refusals: dict[str, int]
    planned_drops: int
    tokens_received: int
    connections_killed: int
    """Connections of workers that were killed."""
    faults: list[DoneFault]
    """In their order; at_s counts from the start of the run."""
    streams_resumed: int
    longest_settle_s: float
    longest_complete_request: str
    descriptors: dict[str, list[int]]
    """By role: at the base and at the end, of the process with the most."""
    memory: list[dict[str, Any]]
    memory_not_measured: list[str]
    """Roles of which no process was measured twice."""
    imbalances: dict[str, int]
    examples: dict[str, list[str]]

    @property
    def is_balanced(self) -> bool:
        return not self.imbalances

    def tables(self) -> str:
        """The report as Markdown."""
        requests = [
            (name, f"{count:,}", f"{100 * count / max(self.requests, 1):.1f} %") for name, count in self.ends.items()
        ]
        figures = [
            ("requests", f"{self.requests:,}"),
            ("planned to be dropped by the client", f"{self.planned_drops:,}"),
            ("tokens received", f"{self.tokens_received:,}"),
            ("connections that killed workers had", f"{self.connections_killed:,}"),
            ("streams that went on in another backend", f"{self.streams_resumed:,}"),
            ("until the server was idle after a round, at most", f"{self.longest_settle_s:.1f} s"),
            ("longest complete request", self.longest_complete_request),
            ("duration", f"{self.lasted_s:.0f} s"),
        ]
        memory = [
            (
                f"{each['role']} {each['pid']}",
                f"{each['requests']:,}",
                f"{each['from_bytes']:,}",
                f"{each['to_bytes']:,}",
                f"{each['to_bytes'] - each['from_bytes']:+,}",
                f"{each['bytes_per_10k']:+,.0f}",
                f"{each['limit_bytes']:,}",
            )
            for each in self.memory
        ]
        parts = [
            f"`{self.command}`\n\ncommit {self.commit}; model {self.model}; {self.machine.describe()}",
            _table(("each request ended in one of", "requests", "share"), requests),
            _table(("refused with", "requests"), _counts(self.refusals)),
            _table(("figure", ""), figures),
            _table(("fault", "times", "got over after, at most"), _faults(self.faults)),
            _table(
                ("descriptors without TCP connections", "base", "end"),
                [(role, *map(str, pair)) for role, pair in self.descriptors.items()],
            ),
            _table(("RSS in bytes", "requests", "warm", "end", "growth", "slope per 10,000", "allowed"), memory),
            self._not_measured(),
            self._verdict(),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _not_measured(self) -> str:
        if not self.memory_not_measured:
            return ""
        roles = ", ".join(self.memory_not_measured)
        return f"Memory was not compared for {roles}: no process of the role was measured twice."

    def _verdict(self) -> str:
        if self.is_balanced:
            return "**Everything balances.**"
        lines = [f"* {name}: {count:,}" for name, count in self.imbalances.items()]
        for name, examples in self.examples.items():
            lines += [f"    * {name}: {example}" for example in examples]
        return "**It does not balance:**\n\n" + "\n".join(lines)


def make_report(argv: Sequence[str], outcome: Outcome) -> ChaosReport:
    ledger = outcome.ledger
    base, end = _most(outcome.base_states), _most(outcome.states)
    return ChaosReport(
        command=shlex.join(["penstock", *argv]),
        commit=_commit(),
        machine=this_machine(),
        model=outcome.model,
        lasted_s=outcome.lasted_s,
        requests=ledger.num_ended,
        ends={kind.value: ledger.ends[kind] for kind in EndKind},
        refusals=dict(ledger.refusals),
        planned_drops=outcome.num_planned_drops,
        tokens_received=ledger.tokens_received,
        connections_killed=ledger.num_connections_killed,
        faults=[replace(fault, at_s=fault.at_s - outcome.started_s) for fault in outcome.faults],
        streams_resumed=outcome.resumed,
        longest_settle_s=outcome.longest_settle_s,
        longest_complete_request=_longest(outcome),
        descriptors={role: [base.get(role, 0), end.get(role, 0)] for role in sorted(base | end)},
        memory=[asdict(each) | {"limit_bytes": each.limit_bytes} for each in outcome.growths],
        memory_not_measured=outcome.unmeasured_roles,
        imbalances=dict(ledger.imbalances),
        examples=ledger.examples,
    )


def write_report(path: Path, report: ChaosReport) -> None:
    """Write JSON if the name ends so, else Markdown. Raises ChaosError."""
    try:
        if path.suffix == ".json":
            path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        else:
            path.write_text(report.tables(), encoding="utf-8")
    except OSError as error:
        raise ChaosError(f"--report {path} cannot be written: {error.strerror}") from None


def _most(states: Iterable[Any]) -> dict[str, int]:
    most: dict[str, int] = {}
    for state in states:
        most[state.role] = max(most.get(state.role, 0), state.descriptors)
    return most


def _longest(outcome: Outcome) -> str:
    ending = outcome.longest_request
    if ending is None:
        return "none"
    at_s = ending.started_s - outcome.started_s
    return f"{ending.ended_s - ending.started_s:.1f} s (request {ending.index}, sent after {at_s:.0f} s)"


def _faults(faults: Sequence[DoneFault]) -> list[tuple[str, str, str]]:
    by_kind: dict[str, list[float]] = {}
    for fault in faults:
        by_kind.setdefault(fault.kind, []).append(fault.took_s)
    return [(kind, f"{len(took_s):,}", f"{max(took_s):.1f} s") for kind, took_s in sorted(by_kind.items())]


def _counts(counts: dict[str, int]) -> list[tuple[str, str]]:
    return [(name, f"{count:,}") for name, count in sorted(counts.items())]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Empty without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|", *lines])


def _commit() -> str:
    """The commit of the checkout that this runs from, with a plus if it has changes."""
    root = Path(penstock.__file__).parents[1]
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12"],  # noqa: S607 - found by PATH
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()
