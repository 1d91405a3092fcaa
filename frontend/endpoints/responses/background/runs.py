"""The responses that run in the background of one worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine

from penstock.frontend.endpoints.responses.background.run import BackgroundRun, PutBackError
from penstock.frontend.endpoints.responses.background_places import BackgroundPlaces
from penstock.frontend.endpoints.responses.storage.store import ResponseStore
from penstock.frontend.transport.disconnect import ClientGoneError
from penstock.frontend.transport.errors import ApiError, ErrorKind, shutting_down
from penstock.frontend.transport.open_exchanges import OpenExchanges

logger = logging.getLogger("penstock.responses")

_PUBLISHES_EVERY_S = 0.25
_PUBLISHES_BODY_EVERY = 4
"""The whole response object is written less often than its new events."""
_STOP_TIMEOUT_S = 1.0
"""Time that an ending worker may take to put its runs back. The rest is taken over as from a dead worker."""


class BackgroundRuns:
    """The responses that run in the background of one worker. The other workers see them through the store."""

    def __init__(self, open_exchanges: OpenExchanges, store: ResponseStore) -> None:
        """A run's exchange is one of open_exchanges: it counts as open, and ends with them."""
        self._open_exchanges = open_exchanges
        self._store = store
        self._publisher: asyncio.Task[None] | None = None
        self._runs: dict[str, BackgroundRun] = {}
        self._tasks: dict[asyncio.Task[None], BackgroundRun] = {}
        self.places = BackgroundPlaces()

    async def start(self, run: BackgroundRun, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Start the run. Return once it is submitted and stored; raise the error of an earlier failure.

        Raises ApiError when no further run may start.
        """
        try:
            self.places.take(run.claim)
        except ApiError:
            run.exchange.finish()
            raise
        self.resume(run, work)
        await run.begun.wait()
        if not run.is_submitted:
            raise run.error or ApiError(ErrorKind.INTERNAL, "an internal error occurred")
        try:
            await run.begin()
        except ApiError:
            run.is_dropped = True
            run.cancel()
            raise

    def resume(self, run: BackgroundRun, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Start a run that already has its place."""
        task = asyncio.create_task(self._run(run, work()))
        self._tasks[task] = run
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(lambda _: self.places.release(run.claim))
        if self._store.is_shared and (self._publisher is None or self._publisher.done()):
            self._publisher = asyncio.create_task(self._publish())

    def find(self, tenant: bytes, response_id: str) -> BackgroundRun | None:
        """Return the tenant's run with this id; None when it does not run."""
        run = self._runs.get(response_id)
        return run if run is not None and run.exchange.tenant == tenant else None

    async def cancel(self, tenant: bytes, response_id: str) -> None:
        """Cancel the run, if it runs. Returns when it has ended."""
        run = self.find(tenant, response_id)
        if run is not None:
            run.cancel()
            await run.ended.wait()

    async def stop(self) -> None:
        """Leave the runs to other workers or to the server's next start; end the runs that cannot be left."""
        for run in self._tasks.values():
            run.exchange.abort(shutting_down())
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_TIMEOUT_S)

    async def _run(self, run: BackgroundRun, work: Coroutine[None, None, None]) -> None:
        self._open_exchanges.add(run.exchange)
        self._open_exchanges.take_place(run.exchange)
        run.on_submitted = lambda: self._note_submission(run)
        try:
            try:
                await run.run(work)
                if run.error is not None and not isinstance(run.error, ApiError | ClientGoneError | PutBackError):
                    logger.error("%s failed in the background", run.exchange.request_id, exc_info=run.error)
                if run.is_submitted or run.earlier is not None:
                    await run.conclude()
            finally:
                self._open_exchanges.discard(run.exchange)
                run.ended.set()
            if run.is_submitted or run.earlier is not None:
                await run.store_again()
        finally:
            if run.is_submitted:
                del self._runs[run.response_id]

    def _note_submission(self, run: BackgroundRun) -> None:
        self._runs[run.response_id] = run

    async def _publish(self) -> None:
        """Store the output of runs while they run, and cancel those that other workers want to end.

        Put them back once the worker drains: another one generates them while this one waits for its clients. Runs
        whose events clients have seen continue while the drain lasts: not every model can repeat them.
        """
        turn = 0
        while self._tasks:
            await asyncio.sleep(_PUBLISHES_EVERY_S)
            turn += 1
            for run in list(self._tasks.values()):
                if self._open_exchanges.is_draining and run.can_move and run.events is None:
                    run.exchange.abort(shutting_down())
                    continue
                with contextlib.suppress(ApiError):  # the database has logged it; the next turn tries again
                    await run.publish(with_body=turn % _PUBLISHES_BODY_EVERY == 0)
