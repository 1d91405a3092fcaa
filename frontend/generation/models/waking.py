"""A model that may be asleep: says that requests need it, and waits for its backend."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from penstock.frontend.transport.errors import ApiError, ErrorKind, retry_later, shorten
from penstock.shm.client import ServingClient, backends_of
from penstock.shm.memory.model_table import ModelState, ModelTable

_LOOK_EVERY_S = 0.05
_COUNT_EVERY_S = 0.1
_LONGEST_RETRY_S = 3600
_FOR_EVER_NS, _LONGEST_KEEP_S = 1 << 62, 1e9


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
        self._keep_alive_s: float | None = None
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
        """Keep the model awake, or have it woken, until `done`. Without `keep` it then has the server's time."""
        self._num_uses += 1
        self._keep_alive_s = None
        self._count()

    def done(self) -> None:
        self._num_uses -= 1
        self._count()

    def keep(self, duration_s: float | None) -> None:
        """Let the model sleep this long after its last use: 0 at once, negative never, None the server's own time.

        It sleeps earlier if another model needs its memory.
        """
        self._keep_alive_s = duration_s
        self._note()

    @property
    def kept_s(self) -> float | None:
        """Seconds until its last request lets it sleep; None if that is never or the server's own time."""
        kept_ns = self._table.uses(self._index)[2]
        return None if kept_ns in (0, _FOR_EVER_NS) else max(0.0, (kept_ns - time.monotonic_ns()) / 1e9)

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
        was_counted, self._num_counted = self._num_counted, num_open
        if num_open or was_counted:
            self._note()

    def _note(self) -> None:
        now_ns, keep_s = time.monotonic_ns(), self._keep_alive_s
        kept_ns = 0
        if keep_s is not None:
            kept_ns = now_ns + round(keep_s * 1e9) if 0 <= keep_s <= _LONGEST_KEEP_S else _FOR_EVER_NS
        self._table.note_use(self._index, self._num_counted, now_ns, kept_ns)

    def _failed(self) -> ApiError:
        message = f"{shorten(self._name)} could not be loaded: {self._table.reason(self._index)}"
        retry_after_s = min(math.ceil(self._table.seconds_to_retry(self._index)), _LONGEST_RETRY_S)
        return retry_later(ErrorKind.UNAVAILABLE, message, retry_after_s)
