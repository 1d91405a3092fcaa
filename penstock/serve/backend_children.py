"""How `penstock serve` starts its backends, and keeps the last seconds of one that has crashed."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.backend.errors import StartupError
from penstock.backend.options import BackendOptions
from penstock.backend.passes.cpu.library.thread_counts import num_usable_cores
from penstock.frontend.main import without_secrets
from penstock.process.children import module_argv
from penstock.process.heartbeat import Heartbeat
from penstock.process.options import to_argv
from penstock.process.private_directory import Trust, UnsafeDirectory, check_directory
from penstock.process.supervisor import ChildSpec
from penstock.shm.memory.fd_mailbox import FdMailbox
from penstock.shm.memory.ring import RingReader, create_fd
from penstock.shm.recording.file import RecordingWriter
from penstock.shm.recording.live import read_last

_SECONDS = 10.0
MAX_FILES = 8
"""Files in the directory, at most. The oldest are removed."""
_PREFIX = "crash-"


class CrashFiles:
    """Writes the crash files. Used by the process that holds the ring and restarts the backend. A failed write stops
    nothing."""

    def __init__(self, ring_fd: int, directory: Path, name: str, log: Callable[[str], None]) -> None:
        """name is the backend's. The fd stays the caller's."""
        self._ring_fd = ring_fd
        self._directory = directory
        self._name = name
        self._log = log
        self._written = 0
        """Position up to which the ring is in a file."""

    def write(self) -> None:
        """Write a file, and log where, unless the backend has written nothing since the last one."""
        ring = RingReader(self._ring_fd)
        try:
            if ring.written != self._written:
                path = self._write(ring)
                self._written = ring.written
                self._log(f"the last {_SECONDS:g} s of the {self._name} are in {path}; penstock timeline shows them")
        except (OSError, UnsafeDirectory) as error:
            self._log(f"the last {_SECONDS:g} s of the {self._name} cannot be kept: {error}")
        finally:
            ring.close()

    def _write(self, ring: RingReader) -> Path:
        check_directory(self._directory, Trust.PRIVATE)
        now = time.strftime("%Y%m%dT%H%M%S")
        path = self._directory / f"{_PREFIX}{now}-{self._name.replace(' ', '-').replace('/', '-')}-{ring.written}.rec"
        with RecordingWriter(path) as file:
            file.write(read_last(ring, _SECONDS))
        for old in sorted(self._directory.glob(f"{_PREFIX}*.rec"))[:-MAX_FILES]:
            old.unlink(missing_ok=True)
        return path


class SharedWeights:
    """The mailboxes in which backends leave their packed weights: one for each model, while a backend is prepared."""

    def __init__(self) -> None:
        self._users: list[tuple[object, FdMailbox]] = []

    def open(self, options: BackendOptions) -> FdMailbox:
        """Return the mailbox of all backends that pack the same weights; `release` it. Raises OSError."""
        key = (options.model, options.revision, options.task, options.dtype, options.quantize, options.gpu)
        mailbox = next((known for other, known in self._users if other == key), None) or FdMailbox.create()
        self._users.append((key, mailbox))
        return mailbox

    def release(self, mailbox: FdMailbox) -> None:
        """Release the mailbox. The last release frees the weights in it."""
        index = next(index for index, (_, known) in enumerate(self._users) if known is mailbox)
        del self._users[index]
        if all(known is not mailbox for _, known in self._users):
            mailbox.close()


class CannotStart(Exception):
    """A backend cannot start. The message is one line for the operator."""


@dataclass(frozen=True, slots=True)
class BackendChildren:
    """Settings that all backends of a server share."""

    log: Callable[[str], None]
    hang_timeout_s: float
    num_replicas: int
    """Backends with the same model. On the CPU they share the cores: each gets its part, so that none waits for
    another's threads. A single backend decides for itself."""
    may_die_often: bool
    """A backend that dies again and again leaves the others running."""
    crashes: Path | None
    """Directory for the last seconds of backends that crashed."""
    weights: SharedWeights | None = None
    """None if weights end with their backend."""
    persist_kv: int = 0
    """Bytes for pages that outlive a backend, for each."""

    def prepare(
        self, options: BackendOptions, before: PreparedBackend | None = None, beside: PreparedBackend | None = None
    ) -> PreparedBackend:
        """Allocate the memory that a backend shares with this process.

        before has ended, and leaves its pages to this one; beside still runs, and leaves its pages to it. Raises
        CannotStart for a recorder whose size is out of bounds, or without memory.
        """
        recorder_fd = pages_fd = None
        try:
            if self.persist_kv:
                left = None if before is None else before.pages_fd
                pages_fd = _sparse_memory(self.persist_kv) if left is None else os.dup(left)
            if options.flight_recorder:
                options.check()
                recorder_fd = create_fd(options.flight_recorder)
            weights = None if self.weights is None else self.weights.open(options)
            hand_over = (
                tuple(os.memfd_create(f"penstock-hand-over-{kind}") for kind in ("pages", "states"))
                if beside is None
                else tuple(map(os.dup, beside.hand_over))
            )
            known = beside or before
            adapters_fd = os.memfd_create("penstock-adapters") if known is None else os.dup(known.adapters_fd)
        except (StartupError, OSError) as error:
            raise CannotStart(str(error)) from error
        return PreparedBackend(
            self, options, Heartbeat.create(), hand_over, adapters_fd, recorder_fd, weights, pages_fd
        )


@dataclass(frozen=True, slots=True)
class PreparedBackend:
    """A backend's options, and the resources that outlive each of its processes: heartbeat, flight recorder, weights,
    pages."""

    common: BackendChildren
    options: BackendOptions
    heartbeat: Heartbeat
    hand_over: tuple[int, ...]
    """fds of the memory that this backend and its successor have in common: for pages, and for checkpoints."""
    adapters_fd: int
    """fd of the list of adapters that were loaded at run time."""
    recorder_fd: int | None
    weights: FdMailbox | None = None
    pages_fd: int | None = None

    def spec(self, name: str, **changes: Any) -> ChildSpec:
        """Return how to start it. changes replace options."""
        common, weights_fds = self.common, () if self.weights is None else self.weights.fds
        options = dataclasses.replace(
            self.options,
            heartbeat_fd=self.heartbeat.fd,
            recorder_fd=self.recorder_fd,
            weights_fds=weights_fds,
            persist_kv_fd=self.pages_fd,
            hand_over_fds=self.hand_over,
            adapters_fd=self.adapters_fd,
            **changes,
        )
        fds = [self.heartbeat.fd, *self.hand_over, self.adapters_fd, *weights_fds]
        crash_files = None
        if self.pages_fd is not None:
            fds.append(self.pages_fd)
        if self.recorder_fd is not None:
            fds.append(self.recorder_fd)
            if common.crashes is not None:
                crash_files = CrashFiles(self.recorder_fd, common.crashes, name, common.log)
        return ChildSpec(
            name,
            module_argv("penstock.backend.main", to_argv(options)),
            tuple(fds),
            _share_of_cores(common.num_replicas) | without_secrets(os.environ),
            stage=0,
            heartbeat=self.heartbeat,
            hang_timeout_s=common.hang_timeout_s,
            on_crash=functools.partial(self._note_crash, name, crash_files),
            # With replicas streams continue elsewhere, and a standby process for each would take as much memory.
            standby_option="--turn-fd" if self.weights is not None and common.num_replicas == 1 else None,
            may_die_often=common.may_die_often,
        )

    def _note_crash(self, name: str, crash_files: CrashFiles | None, returncode: int) -> None:
        if crash_files is not None:
            crash_files.write()
        if returncode == -signal.SIGBUS and self.weights is not None and not self.weights.is_empty:
            # Each further backend would map the same broken page, and die of it.
            self.common.log(f"{name} died by SIGBUS, so the shared weights are dropped: their memory may be broken")
            self.drop_weights()

    def drop_weights(self) -> None:
        """Free the memory of its weights when no backend uses them any more."""
        if self.weights is not None:
            self.weights.clear()

    def close(self) -> None:
        """Call when its last process has ended."""
        self.heartbeat.close()
        if self.common.weights is not None and self.weights is not None:
            self.common.weights.release(self.weights)
        for fd in (*self.hand_over, self.adapters_fd, self.recorder_fd, self.pages_fd):
            if fd is not None:
                os.close(fd)


def _sparse_memory(num_bytes: int) -> int:
    """An fd of memory that the backend allocates, if its model can use it."""
    fd = os.memfd_create("penstock-pages", os.MFD_CLOEXEC)
    os.truncate(fd, num_bytes)
    return fd


def _share_of_cores(num_replicas: int) -> dict[str, str]:
    return {} if num_replicas == 1 else {"OMP_NUM_THREADS": str(max(1, num_usable_cores() // num_replicas))}
