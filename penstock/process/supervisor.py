"""Keeps child processes running: starts them, restarts those that die, stops them in order.

`frontend` uses it for its workers, `penstock serve` for backend and frontend. It owns no sockets and speaks no
protocol. Everything happens in one thread that sleeps in sigtimedwait.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.process.children import Standby, stop_with_parent
from penstock.process.heartbeat import HangWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.process.heartbeat import Heartbeat
    from penstock.process.service_manager import ServiceManager

_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_SIGNALS = _STOP_SIGNALS | {signal.SIGCHLD, signal.SIGUSR2}
_LONGEST_SLEEP_S = 60.0
_IS_UP_EVERY_S = 0.1
_ATTEND_EVERY_S = 0.05
_MOST_QUICK_DEATHS = 100
"""Counter limit for a child that may die often."""
_WATCH_EVERY_S = 1.0
_STOP_AFTER_SECOND_SIGNAL_S = 5.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start a child. It inherits pass_fds under the same numbers; env None is this process's environment.

    Children of a higher stage stop first; the next stage stops when all of them have ended. So a frontend (stage 1)
    drains while the backend (stage 0) still answers it.
    """

    name: str
    argv: tuple[str, ...]
    pass_fds: tuple[int, ...] = ()
    env: Mapping[str, str] | None = None
    stage: int = 0
    reloads: bool = False
    """On SIGHUP it reads its files again.

    It starts with SIGHUP blocked and unblocks it once it can handle it: an earlier signal would kill it.
    """
    heartbeat: Heartbeat | None = None
    """The child, which has the fd in pass_fds, beats it from its first to its last turn."""
    hang_timeout_s: float = 0.0
    """A child whose heartbeat is silent for longer is killed, and restarted like one that died; 0 is never."""
    on_crash: Callable[[int], None] | None = None
    """Called with the Popen.returncode after the child has died or failed by itself, before it is restarted."""
    standby_option: str | None = None
    """An option of argv that takes an fd.

    While the child runs, another process waits with its imports done. When the child dies, a byte on the fd lets the
    waiting process take its place (`standby.wait_for_turn`).
    """
    may_die_often: bool = False
    """After its start it is restarted, however often it dies. Without is_up the start lasts until it has run for
    settle_s once."""


def exit_status(returncode: int) -> int:
    """The shell's exit status for a Popen.returncode: death by signal n is 128 + n."""
    return returncode if returncode >= 0 else 128 - returncode


def describe_end(returncode: int) -> str:
    """ "exited with status 1", "died by SIGKILL"."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"died by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"died by signal {-returncode}"


@dataclass(slots=True, eq=False)
class Child:
    """A process and its successors. Only the supervisor changes it."""

    spec: ChildSpec
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    restart_at_s: float = 0.0
    """Monotonic; valid while process is None."""
    has_settled: bool = False
    was_killed: bool = False
    """A signal has ended it once: its start had not failed by itself."""
    quick_deaths: int = 0
    is_kept: bool = True
    """It is restarted when it ends."""
    end: int | None = None
    """The Popen.returncode of a child that is not kept, once it has ended."""
    kill_at_s: float = math.inf
    """Monotonic time at which a child that was told to end is killed."""
    watch: HangWatch | None = None
    standby: Standby = field(default_factory=Standby)

    def __post_init__(self) -> None:
        spec = self.spec
        if spec.heartbeat is not None and spec.hang_timeout_s > 0.0:
            self.watch = HangWatch(spec.heartbeat, spec.hang_timeout_s, longest_step_s=2 * _WATCH_EVERY_S)


class Attendant(Protocol):
    """Replaces children while they run. Both methods are called in the supervisor's thread, and must not block it."""

    def note_signal(self) -> None:
        """SIGUSR2 came."""

    def turn(self) -> bool:
        """Called at the start, often while it returns True, and after each signal."""


class Supervisor:
    """Runs the children until a signal stops it or a child cannot be kept alive.

    A child that ends is restarted: at once if it ran for settle_s, otherwise after a growing pause. Two ends are final,
    because a restart would not help: more than max_quick_deaths in a row (unless it may die often), and a child that
    exits by itself (not by a signal) during its start; it has printed why. The start lasts settle_s. With is_up it
    lasts until is_up, called every 0.1 s, returns True.

    SIGHUP goes to the children that reload; without such children it stops, as when a terminal closes. SIGTERM, SIGINT
    or such a SIGHUP stop the children stage by stage with SIGTERM. A stage that has not ended after stop_timeout_s is
    killed. A second signal sends SIGTERM to all children and shortens the wait.
    """

    def __init__(
        self,
        children: Iterable[ChildSpec],
        *,
        log: Callable[[str], None],
        stop_timeout_s: float,
        settle_s: float = 5.0,
        max_quick_deaths: int = 5,
        first_pause_s: float = 0.1,
        longest_pause_s: float = 5.0,
        is_up: Callable[[], bool] | None = None,
        on_stop: Callable[[], None] | None = None,
        service_manager: ServiceManager | None = None,
    ) -> None:
        """on_stop is called once, just before the children are stopped. service_manager learns of the end of the
        start, of each turn and of the stop."""
        self.children = [Child(spec) for spec in children]
        self.attendant: Attendant | None = None
        """Without one SIGUSR2 does nothing."""
        self._is_attended = True
        self._mask: set[int] = set()
        """The signals that were blocked before `run`."""
        self._log = log
        self._stop_timeout_s = stop_timeout_s
        self._settle_s = settle_s
        self._max_quick_deaths = max_quick_deaths
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._is_up = is_up
        self._on_stop = on_stop
        self._service_manager = service_manager

    def run(self) -> int:
        """Returns the exit status: 0 if a signal stopped it and every child ended well, else that of the first fault.

        Call it in the main thread before starting others: it waits for signals synchronously, and the kernel kills the
        children when the thread that started them ends.
        """
        self._mask = previous = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            for child in self.children:
                self._start(child)
            if self._is_up is None:
                self._report_ready()
            while True:
                received = signal.sigtimedwait(_SIGNALS, self._seconds_to_next_turn())
                if received is not None and received.si_signo in _STOP_SIGNALS and not self._reload(received.si_signo):
                    return self._stop(status=0)
                if self._is_up is not None and self._is_up():
                    self._is_up = None
                    self._report_ready()
                    for child in self.children:
                        child.has_settled = True
                if self._service_manager is not None:
                    self._service_manager.beat()
                for child in self.children:
                    self._kill_if_hung(child)
                    if not child.is_kept:
                        self._look_for_end(child)
                    elif child.process is None:
                        if time.monotonic() >= child.restart_at_s:
                            self._start(child)
                    elif (returncode := child.process.poll()) is not None:
                        if not self._may_restart(child, returncode):
                            return self._stop(status=exit_status(returncode) or 1)
                    else:
                        self._keep_standby(child)
                self._attend(is_called=received is not None and received.si_signo == signal.SIGUSR2)
        finally:
            for process in self._running():
                process.kill()
                process.wait()
            for child in self.children:
                child.standby.drop()
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    @property
    def is_up(self) -> bool:
        """The start is over."""
        return self._is_up is None

    def add(self, spec: ChildSpec) -> Child:
        """Start another child. It is restarted only once `keep` was called. Call in the supervisor's thread."""
        child = Child(spec, is_kept=False)
        self.children.append(child)
        self._start(child)
        return child

    def keep(self, child: Child, spec: ChildSpec) -> None:
        """From now on restart the child as spec says whenever it ends."""
        child.standby.drop()
        child.spec, child.is_kept, child.has_settled, child.end = spec, True, True, None

    def announce_successor(self, child: Child) -> None:
        """Tell the child, which handles SIGUSR1, that another is ready to take its place."""
        if child.process is not None:
            child.process.send_signal(signal.SIGUSR1)

    def retire(self, child: Child) -> None:
        """Tell the child to end; another call sends SIGTERM again. It is not restarted. It is killed after the time
        that a stop may take."""
        child.is_kept = False
        child.standby.drop()
        child.kill_at_s = min(child.kill_at_s, time.monotonic() + self._stop_timeout_s)
        if child.process is not None:
            child.process.terminate()
        elif child.end is None:  # it waits for its restart
            child.end = 0

    def remove(self, child: Child) -> None:
        """Forget a child that has ended."""
        self.children.remove(child)

    def _look_for_end(self, child: Child) -> None:
        if child.process is not None and (returncode := child.process.poll()) is not None:
            child.process, child.end = None, returncode
        elif child.process is not None and time.monotonic() >= child.kill_at_s:
            child.process.kill()

    def _attend(self, *, is_called: bool) -> None:
        if self.attendant is not None and (is_called or self._is_attended):
            if is_called:
                self.attendant.note_signal()
            self._is_attended = self.attendant.turn()

    def _report_ready(self) -> None:
        if self._service_manager is not None:
            self._service_manager.ready()

    def _reload(self, signal_number: int) -> bool:
        """Pass SIGHUP on. False if the signal means to stop."""
        reloading = [child.process for child in self.children if child.spec.reloads]
        if signal_number != signal.SIGHUP or not reloading:
            return False
        for process in reloading:
            if process is not None:
                process.send_signal(signal.SIGHUP)
        return True

    def _kill_if_hung(self, child: Child) -> None:
        """SIGKILL also ends a stopped process. SIGCHLD reports its end."""
        watch, process = child.watch, child.process
        if watch is not None and watch.is_hung(time.monotonic()) and process is not None and process.poll() is None:
            self._log(f"{child.spec.name} has shown no progress for {watch.silent_s:.0f} s; killing it")
            process.kill()
            watch.restart()

    def _start(self, child: Child) -> None:
        if child.watch is not None:
            child.watch.restart()
        child.process = child.standby.take() or self._spawn(child.spec)
        child.started_s = time.monotonic()

    def _keep_standby(self, child: Child) -> None:
        """Only once the child has started: until then it needs the cores."""
        now_s = time.monotonic()
        if child.spec.standby_option is not None and self.is_up and now_s - child.started_s >= self._settle_s:
            try:
                child.standby.start(lambda turn: self._spawn(child.spec, turn), now_s)
            except OSError as error:
                self._log(f"no successor of {child.spec.name} waits: {error}")

    def _spawn(self, spec: ChildSpec, turn: int | None = None) -> subprocess.Popen[bytes]:
        """turn is the fd of a standby."""
        supervisor_pid = os.getpid()
        child_mask = {*self._mask, signal.SIGHUP} if spec.reloads else self._mask

        def tie_to_supervisor() -> None:
            # Runs in the child between fork and exec.
            stop_with_parent(signal.SIGKILL, supervisor_pid)
            signal.pthread_sigmask(signal.SIG_SETMASK, child_mask)

        waits = () if turn is None or spec.standby_option is None else (spec.standby_option, str(turn))
        return subprocess.Popen(
            (*spec.argv, *waits),
            stdin=subprocess.DEVNULL,
            pass_fds=spec.pass_fds if turn is None else (*spec.pass_fds, turn),
            env=spec.env,
            process_group=0,  # a terminal's Ctrl-C reaches the children once, through the supervisor
            preexec_fn=tie_to_supervisor,
        )

    def _may_restart(self, child: Child, returncode: int) -> bool:
        now_s = time.monotonic()
        child.process = None
        has_settled = now_s - child.started_s >= self._settle_s
        ended = f"{child.spec.name} {describe_end(returncode)}"
        is_starting = self._is_up is not None or not (has_settled or child.has_settled or child.was_killed)
        if returncode > 0 and is_starting:
            self._log(f"{ended} during its start; stopping")
            return False
        child.has_settled |= has_settled
        child.was_killed |= returncode < 0
        child.quick_deaths = 0 if has_settled else min(child.quick_deaths + 1, _MOST_QUICK_DEATHS)
        if child.quick_deaths > self._max_quick_deaths and not (child.spec.may_die_often and child.has_settled):
            self._log(f"{ended}, {child.quick_deaths} times in a row within {self._settle_s:g} s; stopping")
            return False
        pause_s = 0.0
        if child.quick_deaths:
            pause_s = min(self._first_pause_s * 2 ** (child.quick_deaths - 1), self._longest_pause_s)
        child.restart_at_s = now_s + pause_s
        if returncode and child.spec.on_crash is not None:
            child.spec.on_crash(returncode)
        self._log(f"{ended}; restarting" + (f" in {pause_s:g} s" if pause_s else ""))
        return True

    def _seconds_to_next_turn(self) -> float:
        now_s = time.monotonic()
        due_s = [child.restart_at_s for child in self.children if child.process is None and child.is_kept]
        if self.attendant is not None and self._is_attended:
            due_s.append(now_s + _ATTEND_EVERY_S)
        due_s.append(now_s + (_LONGEST_SLEEP_S if self._is_up is None else _IS_UP_EVERY_S))
        if any(child.watch is not None or child.spec.standby_option is not None for child in self.children):
            due_s.append(now_s + _WATCH_EVERY_S)
        if self._service_manager is not None and self._service_manager.beat_every_s is not None:
            due_s.append(now_s + self._service_manager.beat_every_s)
        return max(0.0, min(due_s) - now_s)

    def _running(self, stage: int | None = None) -> list[subprocess.Popen[bytes]]:
        return [
            child.process
            for child in self.children
            if child.process is not None and child.process.poll() is None and stage in (None, child.spec.stage)
        ]

    def _stop(self, status: int) -> int:
        stop_timeout_s = self._stop_timeout_s
        if self._service_manager is not None:
            self._service_manager.stopping()
        if self._on_stop is not None:
            self._on_stop()
        for stage in sorted({child.spec.stage for child in self.children}, reverse=True):
            deadline_s = time.monotonic() + stop_timeout_s
            for process in self._running(stage):
                process.terminate()
            while running := self._running(stage):
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    for process in running:
                        process.kill()
                        process.wait()
                    break
                received = signal.sigtimedwait(_SIGNALS, min(remaining_s, _LONGEST_SLEEP_S))
                if received is not None and received.si_signo in _STOP_SIGNALS and not self._reload(received.si_signo):
                    stop_timeout_s = min(stop_timeout_s, _STOP_AFTER_SECOND_SIGNAL_S)
                    deadline_s = min(deadline_s, time.monotonic() + _STOP_AFTER_SECOND_SIGNAL_S)
                    for process in self._running():
                        process.terminate()
        return status or self._worst_end()

    def _worst_end(self) -> int:
        for child in self.children:
            if child.process is None or child.process.returncode in (0, -signal.SIGTERM):
                continue
            self._log(f"{child.spec.name} {describe_end(child.process.returncode)} while stopping")
            return exit_status(child.process.returncode)
        return 0
