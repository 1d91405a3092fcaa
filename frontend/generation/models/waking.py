"""A model that may be asleep: says that requests need it, and waits for its backend."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from penstock.frontend.transport.errors import ErrorKind, retry_later, shorten
from penstock.shm.client import backends_of
from penstock.shm.memory.model_table import ModelState

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.frontend.transport.errors import ApiError
    from penstock.shm.client import ServingClient
    from penstock.shm.memory.model_table import ModelTable

_LOOK_EVERY_S = 0.05
_COUNT_EVERY_S = 0.1
_LONGEST_RETRY_S = 3600


class WakingModel:
    """One worker's view of a model that another process wakes while requests need it, and puts to sleep later.

    A request needs it from `use` until `done`, and while it has an open stream, which `watch` notices.
    """

    def __init__(self, name: str, table: ModelTable, index: int, backend: ServingClient) -> None:
        self._name = name
        self._table = table
        self._index = index
        self._backend = backend
        self._num_uses = 0
        self._num_counted = 0
        self.first_load = asyncio.Event()
        """Nothing connects to the backend before it."""

    @property
    def state(self) -> ModelState:
        return self._table.state(self._index)

    @property
    def last_wake_s(self) -> float | None:
        return self._table.wake_s(self._index)

    @property
    def failure(self) -> str | None:
        """Why the last attempt to load it failed; None if it succeeded, or if it has been awake since."""
        return self._table.reason(self._index) if self._table.seconds_to_retry(self._index) else None

    def use(self) -> None:
        """Keep the model awake, or have it woken, until `done`."""
        self._num_uses += 1
        self._count()

    def done(self) -> None:
        self._num_uses -= 1
        self._count()

    @property
    def num_open(self) -> int:
        """Requests of all workers that need it."""
        return self._table.uses(self._index)[0]

    async def until_asleep(self) -> None:
        """Ask that it sleep; return when it does, or when a request needs it."""
        self._table.ask_to_sleep(self._index)
        while self.state is not ModelState.ASLEEP and not (self.state is ModelState.AWAKE and self.num_open):  # noqa: ASYNC110 - in shared memory
            await asyncio.sleep(_LOOK_EVERY_S)

    async def until_awake(self, is_loaded: Callable[[], bool]) -> None:
        """Return when the model can be used. Raises ApiError when it could not be loaded. Call between `use` and
        `done`."""
        failures = self._table.failures(self._index)
        while not (self.state is ModelState.AWAKE and self._backend.ready and is_loaded()):
            if self._table.failures(self._index) != failures or self._table.seconds_to_retry(self._index):
                raise self._failed()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def watch(self) -> None:
        """Connect once the model is loaded for the first time, and count streams. Runs until cancelled."""
        while self.state is ModelState.ASLEEP:  # noqa: ASYNC110 - in shared memory
            await asyncio.sleep(_COUNT_EVERY_S)
        self.first_load.set()
        await self._backend.start()
        while True:
            self._count()
            await asyncio.sleep(_COUNT_EVERY_S)

    def _count(self) -> None:
        num_open = self._num_uses + sum(client.board.requests_open for _, client in backends_of(self._backend))
        if num_open or self._num_counted:
            self._table.note_use(self._index, num_open, time.monotonic_ns())
        self._num_counted = num_open

    def _failed(self) -> ApiError:
        message = f"{shorten(self._name)} could not be loaded: {self._table.reason(self._index)}"
        retry_after_s = min(math.ceil(self._table.seconds_to_retry(self._index)), _LONGEST_RETRY_S)
        return retry_later(ErrorKind.UNAVAILABLE, message, retry_after_s)
