"""The laboratory's processes: how they start, end with this one, and pause; and what /proc says of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, ClassVar, NoReturn

from penstock.process.children import stat_fields, stop_with_parent

_STOP_TIMEOUT_S = 60.0
_TAIL_LINES = 12
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that a command stops what it started and removes its temporary files."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


class ChildEnded(Exception):
    """A child has ended by itself. The message has its status and its last lines."""


class Child:
    """A process that ends with this one. It writes into a log, or answers line by line."""

    failure: ClassVar[type[Exception]] = ChildEnded
    """What its methods raise."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: IO[bytes],
        *,
        has_session: bool = False,
        answers: bool = False,
    ) -> None:
        """log receives its standard error, and its standard output unless it answers. Raises OSError.

        has_session: all its descendants can be found (`session_members`), even those with process groups of their own.
        Without it, the child has a process group: Ctrl-C reaches it through us, once. But the group is in our session:
        if we are killed while the child is paused, the kernel resumes it, because its group is then an orphaned one,
        and SIGTERM ends it.
        """
        self.name = name
        self.log = log
        self._has_session = has_session
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if answers else subprocess.DEVNULL,
            stdout=subprocess.PIPE if answers else log,
            stderr=log,
            env=environment,
            process_group=None if has_session else 0,
            start_new_session=has_session,
            preexec_fn=stop_with_parent,
        )
        self.pid = self.process.pid

    def check_alive(self, when: str = "too early") -> None:
        """Raises `failure`."""
        if self.process.poll() is not None:
            raise self.failure(f"{self.name} ended with status {self.process.returncode} {when}\n{self.log_tail()}")

    def log_text(self) -> str:
        # pread: the child and we share the file position, and the child writes there.
        return os.pread(self.log.fileno(), os.fstat(self.log.fileno()).st_size, 0).decode(errors="replace")

    def log_tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-_TAIL_LINES:])

    def ask(self, line: bytes) -> bytes:
        """Send a line to a child that answers, and return its next one. Raises `failure`."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(line + b"\n")
                self.process.stdin.flush()
        return self.read_line()

    def read_line(self) -> bytes:
        """Return the next line of a child that answers. Raises `failure`."""
        line = self.process.stdout.readline() if self.process.stdout is not None else b""
        if not line:
            raise self.failure(f"{self.name} ended\n{self.log_tail()}")
        return line

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """It uses no CPU while the context lasts, except in `running` contexts. Its memory stays."""
        self._pause()
        try:
            yield
        finally:
            self._resume()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within `paused`: it runs while the context lasts. Raises `failure` if it has ended at exit."""
        self._resume()
        try:
            yield
            self.check_alive("during the run")
        finally:
            self._pause()

    def _pause(self) -> None:
        if self.process.poll() is None:  # else the pid may be another process's by now
            pause_tree(self.pid)

    def _resume(self) -> None:
        if self.process.poll() is None:
            resume_tree(self.pid)

    def stop(self) -> int:
        """Return the exit status; that of SIGKILL if SIGTERM was not enough."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        status = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        return status

    def kill_rest(self) -> list[int]:
        """Kill all that it has left behind in its session; of a group, without naming them."""
        left = [pid for pid in session_members(self.pid) if pid != self.pid] if self._has_session else []
        _signal_all(left, signal.SIGKILL)
        if not self._has_session:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return left


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """cpu_s is the user and system time of all threads, in steps of 10 ms."""

    pid: int
    cpu_s: float
    rss_bytes: int


def state_of(pid: int) -> str:
    """Return "T" for a stopped process, "Z" for a zombie, other letters for others, and "" for none."""
    try:
        return stat_fields(pid)[0]
    except ProcessLookupError:
        return ""


def is_running(pid: int) -> bool:
    """False for a zombie."""
    return state_of(pid) not in ("", "Z")


def process_use(pid: int) -> ProcessUse:
    """Raises ProcessLookupError."""
    fields = stat_fields(pid)
    ticks = int(fields[11]) + int(fields[12])
    return ProcessUse(pid, ticks / _TICKS_PER_S, int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))


@dataclass(frozen=True, slots=True)
class ThreadsUse:
    """CPU time of a process's first thread, and of its others together, to the nanosecond."""

    first_s: float
    others_s: float


def threads_use(pid: int) -> ThreadsUse:
    """Threads that have ended are left out. Raises ProcessLookupError."""
    cpu_s: dict[int, float] = {}
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            cpu_s[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        first_s = cpu_s.pop(pid)
    except (FileNotFoundError, KeyError):
        raise ProcessLookupError(f"no process {pid}, or a kernel without schedstat") from None
    return ThreadsUse(first_s, sum(cpu_s.values()))


def _all_processes() -> Iterator[tuple[int, list[str]]]:
    """Yield the pid and the `stat_fields` of each process of the machine."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                yield int(entry.name), stat_fields(int(entry.name))
            except ProcessLookupError:
                continue  # it ended while we looked


def descendants(pid: int) -> list[int]:
    """Return all processes below pid, parents before children."""
    children: dict[int, list[int]] = {}
    for each, fields in _all_processes():
        children.setdefault(int(fields[1]), []).append(each)
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


def session_members(session: int) -> dict[int, str]:
    """Return the state of each process of the session ("Z" is a zombie), by pid."""
    return {pid: fields[0] for pid, fields in _all_processes() if int(fields[3]) == session}


def tree(pid: int) -> list[int]:
    """Return the process and all below it, parents before children.

    A server's tree, not its process group: ours gives its children groups of their own.
    """
    return [pid, *descendants(pid)]


def tree_cpu_s(pid: int) -> float:
    """Return the CPU time of all processes of the tree, and of those that ended and were waited for."""
    ticks = 0
    for each in tree(pid):
        with contextlib.suppress(ProcessLookupError):
            ticks += sum(map(int, stat_fields(each)[11:15]))
    return ticks / _TICKS_PER_S


def pause_tree(pid: int) -> None:
    """Stop all processes of the tree. Their memory stays, and no time passes for them.

    Parents stop first: a supervisor that still ran could take a stopped child for a hung one.
    """
    paused: set[int] = set()
    while running := [each for each in tree(pid) if each not in paused]:  # a child may start as its parent stops
        _signal_all(running, signal.SIGSTOP)
        paused.update(running)


def resume_tree(pid: int) -> None:
    """Undo `pause_tree`. Children go on first."""
    _signal_all(tree(pid)[::-1], signal.SIGCONT)


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def module_of(pid: int) -> str:
    """Return the module that the process was started with as `python -m MODULE`; "" for another process, or none."""
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return argv[argv.index(b"-m") + 1].decode() if b"-m" in argv[:-1] else ""
