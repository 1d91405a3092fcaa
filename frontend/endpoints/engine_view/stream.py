"""GET /engine/events: the stream of events that the engine view shows."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from penstock.frontend.endpoints.engine_view.feed import EngineFeed
from penstock.frontend.transport.errors import ApiError, ErrorKind, retry_later, shorten
from penstock.frontend.transport.sse import EventStream
from penstock.shm.client import backends_of

if TYPE_CHECKING:
    from penstock.frontend.endpoints.context import EndpointContext
    from penstock.frontend.generation.models.served_model import ModelKeeper
    from penstock.frontend.transport.exchange import Exchange
    from penstock.shm.client import BackendClient

MAX_VIEWERS = 64
"""Streams of one worker, at most."""
_RETRY_AFTER_S = 5


class EngineStreams:
    """One worker's streams. They are not requests to a model, so they take no request's place."""

    def __init__(self) -> None:
        self._feeds: dict[tuple[ModelKeeper, str], EngineFeed] = {}
        """By model, and the replica's name."""
        self._num_viewers = 0

    async def watch(self, exchange: Exchange, context: EndpointContext) -> None:
        """Send events until the client hangs up or the server drains. Raises ApiError, ClientGoneError."""
        self._check(exchange, context)
        key = _choose(exchange, context)
        stream = EventStream(exchange, lambda: ())
        if exchange.method == "HEAD":
            await stream.end(b"")
            return
        feed = self._feeds.setdefault(key, EngineFeed(lambda: _backend(*key)))
        viewer = feed.join()
        self._num_viewers += 1
        tenant = exchange.payer.hex()
        try:
            async with exchange.cancelled_on_disconnect():
                while (next_one := await viewer.next()) is not None and not context.exchanges.is_draining:
                    update, num_lost = next_one
                    await stream.write(update.data + update.own(tenant, num_lost))
            await stream.end(b"")
        finally:
            self._num_viewers -= 1
            feed.leave(viewer)

    def _check(self, exchange: Exchange, context: EndpointContext) -> None:
        context.admission.cors.refuse_foreign(exchange, "watch the engine")
        if self._num_viewers >= MAX_VIEWERS:
            message = f"too many viewers of the engine: the limit of this worker is {MAX_VIEWERS}; retry later"
            raise retry_later(ErrorKind.OVERLOADED, message, _RETRY_AFTER_S)


def _backend(keeper: ModelKeeper, name: str) -> BackendClient:
    """The replica of this name; the first one if its socket has vanished."""
    backends = dict(backends_of(keeper.backend))
    return backends.get(name) or next(iter(backends.values()))


def _choose(exchange: Exchange, context: EndpointContext) -> tuple[ModelKeeper, str]:
    """The model and the replica that the query names, or the first ones. Raises ApiError."""
    query = parse_qs(exchange.query.decode("latin-1"))
    model = query.get("model")
    keeper = context.models.generation if model is None else context.models.find("any", model[0])
    names = [name for name, _ in backends_of(keeper.backend)]
    name = query.get("replica", names)[0]
    if name not in names:
        message = f"replica: there is none named {shorten(name)}; there are {', '.join(names)}"
        raise ApiError(ErrorKind.INVALID_VALUE, message, param="replica")
    return keeper, name
