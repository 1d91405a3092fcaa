"""Runs the items that fit the time in processes of their own: a fault or a hang ends one item only."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from penstock.process.cache_directory import CUBINS_VARIABLE
from penstock.process.children import stop_with_parent
from penstock.tools.gpu.clocks import ClockLog
from penstock.tools.gpu.environment import describe_environment, device_fault
from penstock.tools.gpu.items import Item
from penstock.tools.gpu.report import summary_lines, write_report
from penstock.tools.gpu.results import (
    BEGUN,
    CHECKPOINT_VARIABLE,
    DEADLINE_VARIABLE,
    DONE,
    NO_TIME,
    OTHER_TREE_VARIABLE,
    DeviceGone,
    ItemOutcome,
    Results,
    read_outcomes,
)

_GRACE_S = 8.0
_REPORT_EVERY_S = 5.0
"""Seconds between report updates: a killed run writes no report at its end."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """Options of a whole run."""

    out: Path
    seconds: float
    items: Sequence[Item]
    cubins: Path | None = None
    """Directory of compiled kernels: read on a GPU, written without one."""
    commit: str = ""
    other_tree: Path | None = None
    checkpoint: str = ""

    def environment(self, until_s: float, scratch: str) -> dict[str, str]:
        """The variables of its processes. A killed one leaves its temporary files in scratch."""
        given = {
            DEADLINE_VARIABLE: str(until_s), "PYTHONUNBUFFERED": "1", "TMPDIR": scratch,
            OTHER_TREE_VARIABLE: "" if self.other_tree is None else str(self.other_tree),
            CHECKPOINT_VARIABLE: self.checkpoint,
        }  # fmt: skip
        brought = {} if self.cubins is None else {CUBINS_VARIABLE: str(self.cubins)}
        return brought | os.environ | given


@dataclass
class _Process:
    """A process that runs items, one after the other."""

    items: list[Item]
    path: Path
    child: subprocess.Popen[bytes] = field(init=False)

    def outcomes(self) -> list[ItemOutcome]:
        """What it has found; an item during which it ended has failed, and those after it are missing."""
        found, status = read_outcomes(self.path), self.child.poll()
        if found and found[-1].outcome == BEGUN:
            last, now_s = found[-1], time.monotonic()
            item = next(item for item in self.items if item.name == last.name)
            last.ended_s = now_s
            if status is not None:
                is_late = now_s - last.begun_s >= item.limit_s
                last.outcome = "timed out" if is_late else f"ended with status {status}"
        return found

    def kill(self) -> None:
        """What an item started may outlive it, such as torch's compilers: the group is killed."""
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()


def run_all(run: Run) -> int:
    """Run the items in order, each if its seconds are left. Return 0 only if some ran, and every check passed."""
    until_s, outcomes = time.monotonic() + run.seconds - _GRACE_S, list[ItemOutcome]()
    environment, waiting = describe_environment(run.commit), list(run.items)
    # What a process started may still write while the folder is removed.
    with (
        tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as scratch,
        ClockLog() as log,
    ):
        while waiting:
            if time.monotonic() >= until_s:
                outcomes += [ItemOutcome(item.name, NO_TIME, 0.0, 0.0, []) for item in waiting]
                break
            batch = next(list(members) for _, members in groupby(waiting, lambda item: item.is_beside))
            parts = [[item] for item in batch] if batch[0].is_beside else [batch]
            directory = Path(tempfile.mkdtemp(dir=scratch))
            with _started(run, parts, until_s, directory) as processes:
                written_s = 0.0
                while any(process.child.poll() is None for process in processes):
                    if time.monotonic() > until_s + _GRACE_S / 2:
                        break
                    if time.monotonic() - written_s > _REPORT_EVERY_S:
                        so_far = [each for process in processes for each in process.outcomes()]
                        write_report(run.out, [*outcomes, *so_far], environment, log.samples)
                        written_s = time.monotonic()
                    time.sleep(_POLL_S)
            found = [each for process in processes for each in process.outcomes()]
            names, now_s = {each.name for each in found}, time.monotonic()
            lost = [part[0].name for part in parts if part[0].name not in names]
            outcomes += [*found, *(ItemOutcome(name, "its process did not start", now_s, now_s, []) for name in lost)]
            waiting = [item for item in waiting if item.name not in names.union(lost)]
        write_report(run.out, outcomes, environment, log.samples)
    print("\n".join(summary_lines(outcomes)))
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    num_run = sum(outcome.has_run for outcome in outcomes)
    print(f"{num_run} of {len(outcomes)} items ran, {len(failed)} failed; {run.out / 'report.md'}", flush=True)
    return 1 if failed or not num_run else 0


@contextmanager
def _started(run: Run, parts: list[list[Item]], until_s: float, directory: Path) -> Iterator[list[_Process]]:
    """Start a process for each part; when the context ends, so do they."""
    processes: list[_Process] = []
    environment = run.environment(until_s, str(directory.parent))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(parts))))
    try:
        for number, items in enumerate(parts):
            process = _Process(items, directory / f"{number}.jsonl")
            names = ",".join(item.name for item in items)
            argv = [sys.executable, "-m", "penstock.tools.gpu", "--items", names, "--findings", str(process.path)]
            # A group, not a session: a signal that ends our session ends the processes too.
            process.child = subprocess.Popen(argv, process_group=0, env=environment)
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            process.kill()


def run_items(items: Sequence[Item], findings: Path) -> int:
    """Run items in this process, which `run_all` started. Returns the exit status."""
    stop_with_parent(signal.SIGKILL)
    results = Results(findings, float(os.environ[DEADLINE_VARIABLE]) - time.monotonic(), device_fault)
    last_s = results.until_s
    for item in items:
        left_s = last_s - time.monotonic()
        if left_s < item.seconds:
            results.note_item(item.name, NO_TIME)
            print(f"{item.name}: {NO_TIME}: {item.seconds:g} s of {max(left_s, 0):.0f} s", flush=True)
            continue
        print(item.name, flush=True)
        limit_s = min(item.limit_s, left_s + _GRACE_S / 4)
        results.until_s = time.monotonic() + min(limit_s, left_s)
        # Ends the process even if a call into a library hangs.
        faulthandler.dump_traceback_later(limit_s, exit=True)
        results.note_item(item.name, BEGUN)
        try:
            results.attempt(item.name, lambda item=item: importlib.import_module(item.module).run(results, item))  # type: ignore[misc]
        except DeviceGone as gone:
            results.note_item(item.name, f"the device is lost: {gone}")
            return 3
        finally:
            faulthandler.cancel_dump_traceback_later()
        results.note_item(item.name, DONE)
    return 0
