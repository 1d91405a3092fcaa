"""Upgrades of a running `penstock serve`, one at a time: the supervisor's attendant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.serve.backend_children import CannotStart
from penstock.serve.upgrade.control import Caller, CannotUpgrade, ControlSocket
from penstock.serve.upgrade.new_options import BadOptions, changed
from penstock.serve.upgrade.succession import Running, Succession
from penstock.shm.link.listening_address import CannotListen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.process.supervisor import Supervisor
    from penstock.serve.backend_children import BackendChildren


class Upgrades:
    """Replaces all backends of the main model when SIGUSR2 comes."""

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
