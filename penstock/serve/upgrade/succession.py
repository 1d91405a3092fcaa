"""Replaces the backends of a running server, one after the other, without a pause for the streams they compute.

A new backend starts at a socket of its own. When it is ready and has the same model, it takes the old one's path over;
frontends connect to it and move their streams (`penstock.shm.client.replicas`), and the old one ends. If there is no
memory for both, the old one ends first, and streams and new requests wait for the new one, as after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.backend.errors import NO_ROOM_STATUS
from penstock.backend.options import BackendOptions
from penstock.process.supervisor import Child, Supervisor, describe_end
from penstock.serve.backend_children import BackendChildren, CannotStart, PreparedBackend
from penstock.serve.upgrade.control import Caller, CannotUpgrade, ControlSocket
from penstock.serve.upgrade.new_options import BadOptions, changed
from penstock.shm.client.replicas.replica_set import difference
from penstock.shm.link.join import Invitation, Refused, join
from penstock.shm.link.listening_address import LOCK_SUFFIX, CannotListen, successor_path, take_over
from penstock.shm.memory.board import BackendBoard
from penstock.shm.memory.region import RegionError
from penstock.shm.messages import ModelCard, WireError

_CONNECT_LIMIT_S = 10.0
"""Time that the old backend waits for its frontends to find the new one."""
_JOIN_LIMIT_S = 1.0
_SAVE_LIMIT_S = 1.0
"""Time for the pages of running sequences; those that are not copied by then may be computed again."""
_TURNS_PER_STEP = 2
"""Turns of the supervisor, of 0.05 s, after which a backend with such pages has copied some more."""
_FEW_PAGES = 8
"""A backend that has pages to copy copies more with a step; 128 streams fill so many."""
_NICER = 4
"""Added to the nice value of a backend whose streams move: it gets 0.4 of a core where its successor gets one."""


@dataclasses.dataclass(slots=True)
class Running:
    """A backend of the server."""

    name: str
    child: Child
    prepared: PreparedBackend


class Succession:
    """Replaces backends. Its iterators do part of the work at a time, so they do not hold up the supervisor."""

    def __init__(self, supervisor: Supervisor, children: BackendChildren, tell: Callable[[str], None]) -> None:
        self._supervisor = supervisor
        self._children = children
        self._tell = tell

    def replace(self, running: Running, options: BackendOptions) -> Iterator[None]:
        """Replace one backend by one with these options. Raises CannotUpgrade if the old one continues instead."""
        path = options.socket
        next_path = successor_path(path)
        prepared = self._children.prepare(options, beside=running.prepared)
        spec = prepared.spec(f"new {running.name}", socket=next_path, beside_another=True)
        self._tell(f"a new {running.name} starts beside the old one")
        new = self._supervisor.add(spec)
        with contextlib.ExitStack() as visits:
            try:
                yield from self._take_path(new, running.child, path, visits)
            except CannotUpgrade as error:
                yield from self._end(new)
                prepared.close()
                _remove(next_path)
                if new.end != NO_ROOM_STATUS:
                    raise CannotUpgrade(f"the new {running.name} {error}; the old one goes on") from None
                self._tell("there is no memory for both: the old one ends first, and requests wait")
                yield from self._replace_in_place(running, options)
                return
            self._supervisor.keep(new, prepared.spec(running.name))
            self._tell(f"the streams of the old {running.name} move to the new one")
            yield from self._end(running.child)
        running.prepared.close()
        running.child, running.prepared = new, prepared
        self._tell(f"the new {running.name} has taken over")

    def _take_path(self, new: Child, old: Child, path: Path, visits: contextlib.ExitStack) -> Iterator[None]:
        """Wait until the new backend is ready, check it, and give it the path; then wait for the frontends. Raises
        CannotUpgrade, with the rest of a sentence, before the path has changed hands."""
        next_path = successor_path(path)
        while (new_visit := _visit(next_path)) is None:
            if new.end is not None:
                raise CannotUpgrade(f"{describe_end(new.end)} during its start, and has logged why")
            yield
        visits.callback(new_visit.close)
        old_visit = _visit(path)
        if old_visit is not None:  # otherwise it crashes again and again, perhaps
            visits.callback(old_visit.close)
            _check(old_visit.card, new_visit.card)
            self._supervisor.announce_successor(old)
            yield from _saved_pages(old_visit)
        if old.process is not None:
            _step_back(old.process.pid)
        take_over(path, next_path)
        deadline_s = time.monotonic() + _CONNECT_LIMIT_S
        while old_visit is not None and time.monotonic() < deadline_s:
            if new_visit.board.frontends >= max(2, old_visit.board.frontends):
                return
            yield

    def _replace_in_place(self, running: Running, options: BackendOptions) -> Iterator[None]:
        """Replace without room for both. Raises CannotUpgrade if the new one does not start; then the old options apply
        again."""
        yield from self._end(running.child, is_quick=True)
        prepared = self._children.prepare(options, running.prepared)
        new = self._supervisor.add(prepared.spec(running.name))
        while new.end is None and (visit := _visit(options.socket)) is None:
            yield
        if new.end is None and visit is not None:
            visit.close()
        if (end := new.end) is not None:
            self._supervisor.remove(new)
            prepared.close()
            old = running.prepared.spec(running.name)
            running.child = self._supervisor.add(old)
            self._supervisor.keep(running.child, old)
            raise CannotUpgrade(
                f"the new {running.name} {describe_end(end)} during its start; the log says why. One with the old "
                "options starts"
            )
        self._supervisor.keep(new, prepared.spec(running.name))
        running.prepared.close()
        running.child, running.prepared = new, prepared
        self._tell(f"the new {running.name} is ready")

    def _end(self, child: Child, *, is_quick: bool = False) -> Iterator[None]:
        """End the backend. is_quick: its streams continue with the next backend, so it does not wait for their ends."""
        self._supervisor.retire(child)
        while child.end is None:
            yield
            if is_quick:
                self._supervisor.retire(child)
        self._supervisor.remove(child)


def _check(old: ModelCard, new: ModelCard) -> None:
    """Raises CannotUpgrade unless the new backend can continue the streams of the old one."""
    if old.identity != new.identity:
        raise CannotUpgrade(f"is no replica of the old one: {difference(old, new)}; restart the server for that")
    if new.max_context_tokens < old.max_context_tokens:
        raise CannotUpgrade(
            f"has a context of {new.max_context_tokens} tokens, the old one {old.max_context_tokens}, and streams may "
            "be longer: restart the server for that"
        )


def _saved_pages(old: _Visit) -> Iterator[None]:
    """Wait while the old backend copies pages for its successor: until its steps copy no more than streams fill."""
    board, deadline_s = old.board, time.monotonic() + _SAVE_LIMIT_S
    while board.running and time.monotonic() < deadline_s:
        pages, steps = board.pages_saved, board.steps
        for _ in range(_TURNS_PER_STEP):
            yield
        steps = board.steps - steps
        if steps and board.pages_saved - pages <= _FEW_PAGES * steps:
            return


def _step_back(pid: int) -> None:
    """Let the successor go first: while it computes a stream's tokens, the old backend adds more of them."""
    with contextlib.suppress(OSError):  # it ends
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            with contextlib.suppress(OSError):  # the thread ends
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)


class _Visit:
    """A connection to a backend, as a frontend without requests. It counts in `frontends` itself, once the backend has
    counted it."""

    def __init__(self, invitation: Invitation) -> None:
        """Takes ownership of the invitation. Raises CannotUpgrade if the backend's board belongs to other code."""
        self._control = invitation.control
        self.card = invitation.welcome.model
        try:
            self.board = BackendBoard.attach(invitation.backend_board_fd)
        except RegionError as error:
            self._control.close()
            raise CannotUpgrade(f"has other counters: {error}; restart the server for that") from None
        finally:
            invitation.close_fds()

    def close(self) -> None:
        self.board.close()
        self._control.close()


def _visit(path: Path) -> _Visit | None:
    """None if no backend answers now. Raises CannotUpgrade if it speaks another protocol."""
    if not path.is_socket():
        return None
    try:
        return _Visit(asyncio.run(asyncio.wait_for(join(path), _JOIN_LIMIT_S)))
    except Refused as error:
        raise CannotUpgrade(f"cannot be used: {error}; restart the server for that") from None
    except (OSError, TimeoutError, WireError):
        return None


def _remove(path: Path) -> None:
    for name in (path.name, path.name + LOCK_SUFFIX):
        path.with_name(name).unlink(missing_ok=True)


class Upgrades:
    """Replaces all backends of the main model when SIGUSR2 comes, one upgrade at a time: the supervisor's attendant."""

    def __init__(
        self,
        supervisor: Supervisor,
        control: ControlSocket,
        children: BackendChildren,
        running: Sequence[Running],
        log: Callable[[str], None],
    ) -> None:
        self._supervisor = supervisor
        self._control = control
        self._children = children
        self._running = running
        self._log = log
        self._caller = Caller(None, log)
        self._work: Iterator[None] | None = None

    def note_signal(self) -> None:
        """Begin the upgrade that the caller asks for, or refuse it."""
        try:
            caller, words = self._control.accept()
        except BadOptions:
            return
        if self._work is not None or not self._supervisor.is_up:
            what = "the server is still starting" if self._work is None else "another upgrade is running"
            caller.tell(f"no upgrade: {what}")
            caller.end(1)
        else:
            self._caller, self._work = caller, self._upgrade(words, caller.tell)

    def turn(self) -> bool:
        """Continue the upgrade. False when there is none."""
        if self._work is None:
            return False
        try:
            next(self._work)
        except StopIteration:
            status = 0
        except (BadOptions, CannotUpgrade, CannotStart, CannotListen, OSError) as error:
            self._caller.tell(f"no upgrade: {error}")
            status = 1
        else:
            return True
        self._work = None
        self._caller.end(status)
        return False

    def _upgrade(self, words: Sequence[str], tell: Callable[[str], None]) -> Iterator[None]:
        succession = Succession(self._supervisor, self._children, tell)
        plans = [(running, changed(running.prepared.options, words)) for running in self._running]
        for running, options in plans:
            yield from succession.replace(running, options)
