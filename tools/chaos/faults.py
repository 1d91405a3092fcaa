"""Kills, stops, terminates and reloads the server's processes, one after the other, as planned."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.tools.bench.load_generator.http_client import HttpClient
from penstock.tools.chaos.census import connection_inodes, process_state
from penstock.tools.chaos.counters import wait_ready
from penstock.tools.chaos.ledger import DoneFault, Ledger
from penstock.tools.chaos.plan import Fault, FaultKind
from penstock.tools.chaos.server import Server
from penstock.tools.processes import is_running, state_of

_RECOVERY_TIMEOUT_S = 90.0
_EXIT_MARGIN_S = 30.0
_SIGNALS = {
    FaultKind.KILL_BACKEND: ("backend", signal.SIGKILL),
    FaultKind.TERMINATE_BACKEND: ("backend", signal.SIGTERM),
    FaultKind.STOP_BACKEND: ("backend", signal.SIGSTOP),
    FaultKind.HANG_BACKEND: ("backend", signal.SIGSTOP),
    FaultKind.KILL_WORKER: ("worker", signal.SIGKILL),
    FaultKind.TERMINATE_WORKER: ("worker", signal.SIGTERM),
    FaultKind.STOP_WORKER: ("worker", signal.SIGSTOP),
    FaultKind.HANG_UP_WORKER: ("worker", signal.SIGHUP),
}


_READY_IS_STALE = frozenset(
    {FaultKind.KILL_BACKEND, FaultKind.TERMINATE_BACKEND, FaultKind.HANG_BACKEND, FaultKind.KILL_WORKER}
)
_LONGEST_HANG_S = 10.0
_UPGRADE_TIMEOUT_S = 600.0
"""It starts one backend after the other."""
_LOOK_S = 0.05
_STALE_S = 2.2
"""/ready may be green for 2 s after a backend's last turn, and when another worker answers."""


class FaultInjector:
    """Runs the faults of a round. The next fault waits until the server has recovered from the last."""

    def __init__(self, server: Server, ledger: Ledger) -> None:
        self.done: list[DoneFault] = []
        hang_timeout_s = server.options.hang_timeout_s
        is_patient = not 0 < hang_timeout_s <= _LONGEST_HANG_S
        # More requests would come during a longer hang than may wait.
        self.left_out = frozenset({FaultKind.HANG_BACKEND} if is_patient else ())
        if server.options.may_sleep:
            self.left_out |= {FaultKind.UPGRADE, FaultKind.UPGRADE_AND_KILL, FaultKind.RESTART_FRONTEND_B}
        self._server = server
        self._ledger = ledger
        self._last_victim = b""
        """The command line's socket of the backend that had the last fault."""
        urls = [server.url_a] if server.options.may_sleep else [server.url_a, server.url_b]
        self._frontends = [HttpClient(url) for url in urls]

    async def run(self, faults: Sequence[Fault], lasts_s: float, before_each: Callable[[], Awaitable[None]]) -> None:
        """Faults that would come later than lasts_s after now are left out, because the last ones took their time.

        Raises ChaosError if the server does not recover.
        """
        started_s = time.monotonic()
        for fault in faults:
            await asyncio.sleep(max(0.0, started_s + fault.at_s - time.monotonic()))
            if time.monotonic() > started_s + lasts_s:
                return
            await before_each()
            injected_s = time.monotonic()
            await self._inject(fault)
            if fault.kind in _READY_IS_STALE:
                await asyncio.sleep(_STALE_S)
            await self.recovered()
            self.done.append(DoneFault(fault.kind.value, injected_s, time.monotonic() - injected_s))

    async def recovered(self) -> None:
        """Return when all frontends are ready. Raises ChaosError."""
        self._server.check_alive()
        for frontend in self._frontends:
            await wait_ready(frontend, _RECOVERY_TIMEOUT_S)

    async def _inject(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.RELOAD:
                self._server.reload_keys()
            case FaultKind.RESTART_FRONTEND_A:
                if (pid := self._server.frontend_a_pid()) is not None:
                    os.kill(pid, signal.SIGTERM)
                    await self._wait_ended(pid)
            case FaultKind.RESTART_FRONTEND_B:
                await self._restart_frontend_b()
            case FaultKind.UPGRADE:
                await self._upgrade(None)
            case FaultKind.UPGRADE_AND_KILL:
                await self._upgrade(fault)
            case _:
                await self._signal(fault)

    async def _signal(self, fault: Fault) -> None:
        role, number = _SIGNALS[fault.kind]
        pids = sorted(self._server.roles().get(role, ()))
        if self._server.options.may_sleep and role == "backend":
            # A model that wakes may lose one backend: requests outlive no second death.
            pids = [pid for pid in pids if _socket_of(pid) != self._last_victim]
        if not pids:
            return
        pid = pids[fault.pick % len(pids)]
        if role == "backend":
            self._last_victim = _socket_of(pid)
        if fault.kind is FaultKind.KILL_WORKER:
            await self._kill_worker(pid)
            return
        os.kill(pid, number)
        if number == signal.SIGTERM or fault.kind is FaultKind.HANG_BACKEND:
            await self._wait_ended(pid)
        elif number == signal.SIGSTOP:
            try:
                await asyncio.sleep(fault.lasts_s)
            finally:
                with suppress(ProcessLookupError):  # the supervisor has replaced it: --hang-timeout-s is shorter
                    os.kill(pid, signal.SIGCONT)

    async def _kill_worker(self, pid: int) -> None:
        """Kill a worker. Its connections are counted while it is stopped, so it accepts none between the count and its
        end."""
        os.kill(pid, signal.SIGSTOP)
        while state_of(pid) not in ("", "T", "Z"):  # noqa: ASYNC110 - a signal takes effect a moment later
            await asyncio.sleep(0)
        state = process_state("worker", pid, connection_inodes())
        kill = self._ledger.note_kill(time.monotonic(), 0 if state is None else state.connections)
        os.kill(pid, signal.SIGKILL)
        await self._wait_ended(pid, every_s=0.01)
        kill.gone_s = time.monotonic()

    async def _wait_ended(self, pid: int, every_s: float = 0.1, timeout_s: float = 0.0) -> None:
        """Wait until a process that drains or hangs is gone.

        A second SIGTERM would end its streams, so it gets only one.
        """
        timeout_s = timeout_s or self._server.options.drain_timeout_s + _EXIT_MARGIN_S
        deadline_s = time.monotonic() + timeout_s
        while is_running(pid):
            if time.monotonic() > deadline_s:
                self._ledger.imbalance("a process has not ended", f"process {pid} in {timeout_s:g} s")
                return
            await asyncio.sleep(every_s)

    async def _restart_frontend_b(self) -> None:
        """Restart frontend B as a rolling restart does: it drains and ends, then the next one takes its port."""
        child = self._server.frontend_b
        if child is None:
            return
        child.process.terminate()
        await self._wait_ended(child.pid)
        self._ledger.expect("exit status of a drained frontend", child.process.poll(), 0)
        self._server.start_frontend_b()

    async def _upgrade(self, fault: Fault | None) -> None:
        """Upgrade; with a fault, kill the first new backend at some moment of its start.

        Then the old one goes on, and the command fails; or the new one has taken over, and is replaced as after any
        death.
        """
        old = set(self._server.roles().get("backend", ()))
        upgrade = self._server.start_upgrade()
        while fault is not None and upgrade.process.poll() is None:
            if new := [pid for pid in self._server.roles().get("backend", ()) if pid not in old]:
                await asyncio.sleep(fault.lasts_s)
                with suppress(ProcessLookupError):
                    os.kill(new[0], signal.SIGKILL)
                break
            await asyncio.sleep(_LOOK_S)
        await self._wait_ended(upgrade.pid, timeout_s=_UPGRADE_TIMEOUT_S)
        status = upgrade.process.poll()
        if fault is None or status not in (0, 1):
            self._ledger.expect("exit status of an upgrade", status, 0)

    def close(self) -> None:
        for frontend in self._frontends:
            frontend.close()


def _socket_of(pid: int) -> bytes:
    """The value of --socket in a process's command line; empty if the process has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return words[words.index(b"--socket") + 1] if b"--socket" in words else b""
    return b""
