"""GET and DELETE /v1/streams/ID: a client comes back to its stream, at any worker of any frontend."""

from __future__ import annotations

from typing import Literal

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.routes import Handler
from penstock.frontend.generation.failures import backend_unavailable
from penstock.frontend.generation.lingering import ask_for_stream, last_event_id, read_record
from penstock.frontend.transport.errors import ApiError, ErrorKind, error_format_for, shorten
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.client import BackendClient, StreamName, StreamQuestion, clients_of

_PATH = "/v1/streams/"
_MAX_ID_CHARACTERS = 128
_BODY_TIMEOUT_S = 5.0


class StreamTable:
    """The endpoints of one worker."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        """handlers are the endpoints whose streams can linger, by path."""
        self._handlers = handlers

    async def resume(self, exchange: Exchange, context: EndpointContext) -> None:
        """GET /v1/streams/ID: the events after Last-Event-ID. Raises ApiError, ClientGoneError."""
        num_received = last_event_id(exchange) + 1
        path = await find_stream(exchange, context, exchange.path.removeprefix(_PATH), num_received)
        await self._handlers[path](exchange, context)

    async def drop(self, exchange: Exchange, context: EndpointContext) -> None:
        """DELETE /v1/streams/ID. Raises ApiError."""
        await _ask_all(exchange, context, exchange.path.removeprefix(_PATH), "drop")
        await exchange.respond(200, b'{"object":"stream.deleted"}')


async def find_stream(exchange: Exchange, context: EndpointContext, stream_id: str, num_received: int) -> str:
    """Let the exchange continue the stream; return the path of the endpoint that must answer it.

    Raises ApiError, ClientGoneError.
    """
    await exchange.read_body(max_bytes=0, timeout_s=_BODY_TIMEOUT_S)
    backend, record = await _ask_all(exchange, context, stream_id, "read")
    exchange.lingering = lingering = read_record(record, backend, num_received)
    exchange.unread_body = lingering.body  # for an endpoint that reads ahead
    exchange.error_format = error_format_for(lingering.path, "POST")
    return lingering.path


async def _ask_all(
    exchange: Exchange, context: EndpointContext, stream_id: str, action: Literal["read", "drop"]
) -> tuple[BackendClient, bytes]:
    """Ask each backend for a stream of the exchange's tenant, until one has it. Raises ApiError."""
    unknown = ApiError(
        ErrorKind.UNKNOWN_STREAM,
        f"no stream {shorten(stream_id)}: it was not asked to linger, its time is up, or it never was",
    )
    if not 1 <= len(stream_id) <= _MAX_ID_CHARACTERS:
        raise unknown
    question = StreamQuestion(StreamName(exchange.tenant, stream_id), action)
    if (found := await ask_for_stream(context.models.keepers, question)) is not None:
        return found
    backends = [backend for keeper in context.models.keepers for backend in clients_of(keeper.backend)]
    if not any(backend.ready for backend in backends):
        raise backend_unavailable(backends[0].retry_after_s)
    raise unknown
