"""The CPU time that processes outside a measurement take, and the repetition of rounds that they disturb."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.tools.bench.load_generator.stats import LoadSummary
from penstock.tools.processes import tree_cpu_s

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_QUIET_S = 1.0
_MAX_WAIT_S = 30.0


def machine_cpu_s() -> float:
    """Return the time that the CPUs of this process were busy or taken by the hypervisor, since the machine started.

    Interrupts are left out: most are caused by the packets of the load itself.
    """
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in usable:
            user, nice, system, _idle, _iowait, _irq, _softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + steal
    return ticks / _TICKS_PER_S


class ForeignCpu:
    """CPU time of all processes except this one and those of the given trees, from now on."""

    def __init__(self, *our_pids: int) -> None:
        self._our_pids = our_pids
        self._from_s = time.perf_counter()
        self._before_s = self._read_s()

    def cores(self) -> float:
        """Return CPU seconds per second. /proc counts in ticks of 10 ms, so a short time gives a coarse figure."""
        return max(0.0, (self._read_s() - self._before_s) / (time.perf_counter() - self._from_s))

    def _read_s(self) -> float:
        return machine_cpu_s() - sum(map(tree_cpu_s, self._our_pids)) - time.process_time()


@dataclass(frozen=True, slots=True)
class WatchedRound:
    """One round of load on one server."""

    summary: LoadSummary
    foreign_cores: float
    attempts: int = 1
    """How often the round ran; this is the attempt with the least foreign CPU time."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """When a round counts as disturbed, and how often it is then repeated."""

    limit_cores: float
    max_repeats: int

    async def repeat(self, attempt: Callable[[], Awaitable[WatchedRound]]) -> WatchedRound:
        """Return the first undisturbed round; the least disturbed one if there is none.

        Waits up to 30 s for a quiet second before each repetition. No server may run between attempts.
        """
        rounds = [await attempt()]
        while self.has_disturbed(rounds[-1]) and len(rounds) <= self.max_repeats:
            await self._wait_until_quiet()
            rounds.append(await attempt())
        best = min(rounds, key=lambda item: item.foreign_cores)
        return WatchedRound(best.summary, best.foreign_cores, len(rounds))

    def has_disturbed(self, item: WatchedRound) -> bool:
        return item.foreign_cores > self.limit_cores

    async def _wait_until_quiet(self) -> None:
        give_up_s = time.monotonic() + _MAX_WAIT_S
        while time.monotonic() < give_up_s:
            foreign = ForeignCpu()
            await asyncio.sleep(_QUIET_S)
            if foreign.cores() <= self.limit_cores:
                return
