"""The server's processes: their descriptors, memory and children, from /proc."""

from __future__ import annotations

import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.process.children import stat_fields
from penstock.tools.chaos.ledger import Ledger
from penstock.tools.processes import process_use

MAX_GROWTH_BYTES = 24 << 20
"""Bytes that a process may grow by after warming up, whatever it has served: arenas of malloc, caches that fill."""
MAX_GROWTH_BYTES_PER_10K = 8 << 20
"""Further growth allowed for each 10,000 requests: 0.8 KB for each, less than any leaked request."""

ELASTIC_ROLE = "grammar compiler"
"""Role of processes that come and go with the work. Each costs the backend a descriptor."""

_LISTENING = "0A"
"""As /proc/net/tcp writes it."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    role: str
    pid: int
    started_ticks: int
    """With the pid it tells a process from a later one of the same number."""
    descriptors: int
    """Open file descriptors other than TCP connections."""
    connections: int
    """Open TCP connections."""
    rss_bytes: int

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.started_ticks


def process_state(role: str, pid: int, tcp_inodes: frozenset[str]) -> ProcessState | None:
    """None if it has ended."""
    try:
        started_ticks = int(stat_fields(pid)[19])
        links = [_target(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        rss_bytes = process_use(pid).rss_bytes
    except OSError:
        return None
    if not rss_bytes:  # a process that is ending, or a zombie
        return None
    connections = sum(link.startswith("socket:[") and link[8:-1] in tcp_inodes for link in links)
    return ProcessState(role, pid, started_ticks, len(links) - connections, connections, rss_bytes)


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # closed meanwhile
        return ""


def connection_inodes() -> frozenset[str]:
    """Inodes of all TCP connections of this machine that somebody still holds."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net", name)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] != _LISTENING and fields[9] != "0":
                inodes.add(fields[9])
    return frozenset(inodes)


def take_census(roles: Mapping[str, Iterable[int]]) -> list[ProcessState]:
    """The state of every process, by role."""
    tcp_inodes = connection_inodes()
    states = (process_state(role, pid, tcp_inodes) for role, pids in roles.items() for pid in pids)
    return [state for state in states if state is not None]


@dataclass(frozen=True, slots=True)
class Growth:
    """Change of one process's memory after warming up."""

    role: str
    pid: int
    requests: int
    from_bytes: int
    to_bytes: int
    bytes_per_10k: float
    """The slope of a straight line through all measurements."""

    @property
    def limit_bytes(self) -> int:
        return MAX_GROWTH_BYTES + MAX_GROWTH_BYTES_PER_10K * self.requests // 10_000


class Watch:
    """Compares each census with the first: descriptors by role, memory by process."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._rss: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self._roles: dict[tuple[int, int], str] = {}

    def take_base(self, states: Iterable[ProcessState]) -> None:
        """Take the numbers of the warm, idle server, to which it must come back."""
        for state in states:
            self._descriptors[state.role] = max(state.descriptors, self._descriptors.get(state.role, 0))
            self._counts[state.role] += 1

    def problems(self, states: Sequence[ProcessState]) -> list[tuple[str, str]]:
        """Return the imbalances: the kind and the role of each."""
        found = []
        counts = Counter(state.role for state in states)
        more_compilers = counts[ELASTIC_ROLE] - self._counts[ELASTIC_ROLE]
        for state in states:
            base = self._descriptors.get(state.role)
            allowed = None if base is None else base + (max(0, more_compilers) if state.role == "backend" else 0)
            if allowed is not None and state.descriptors > allowed:
                text = f"{state.role} {state.pid} has {state.descriptors}; its base is {allowed}"
                found.append(("descriptors were leaked", text))
        for role in sorted({*counts, *self._counts} - {ELASTIC_ROLE}):
            if counts[role] != self._counts[role]:
                text = f"{counts[role]} of {role} instead of {self._counts[role]}"
                found.append(("processes are missing or left over", text))
        return found

    def note_memory(self, states: Iterable[ProcessState], num_requests: int) -> None:
        """Remember each process's memory after num_requests."""
        for state in states:
            self._rss[state.key].append((num_requests, state.rss_bytes))
            self._roles[state.key] = state.role

    def growths(self) -> list[Growth]:
        """Return the growth of each process that was measured twice or more, from the first measurement to the last."""
        found = []
        for key, points in self._rss.items():
            if len(points) > 1 and points[-1][0] > points[0][0]:
                (first, from_bytes), (last, to_bytes) = points[0], points[-1]
                slope = 10_000 * statistics.linear_regression(*zip(*points, strict=True)).slope
                found.append(Growth(self._roles[key], key[0], last - first, from_bytes, to_bytes, slope))
        return found

    def unmeasured_roles(self, growths: Iterable[Growth]) -> list[str]:
        """Roles of which no process lived long enough to be measured twice."""
        return sorted({*self._counts, *self._roles.values()} - {growth.role for growth in growths})


def check_memory(ledger: Ledger, growths: Iterable[Growth]) -> None:
    for growth in growths:
        grown = growth.to_bytes - growth.from_bytes
        if grown > growth.limit_bytes:
            ledger.imbalance(
                "a process grew beyond its bound",
                f"{growth.role} {growth.pid}: {grown:,} bytes in {growth.requests:,} requests; "
                f"at most {growth.limit_bytes:,}",
            )
