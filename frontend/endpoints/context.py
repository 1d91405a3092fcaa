"""Shared state of one worker's endpoints, and how they receive a request's body."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from msgspec import Struct
from msgspec.json import Decoder

from penstock.frontend.access.admission import Admission
from penstock.frontend.generation.failures import expired
from penstock.frontend.generation.lingering import kept_or_anew, read_linger
from penstock.frontend.generation.models.model_table import ServedModels, Task
from penstock.frontend.generation.models.served_model import ModelKeeper, ServedModel
from penstock.frontend.generation.models.waking import WakingModel
from penstock.frontend.generation.request_policy import read_request_policy
from penstock.frontend.schemas.decoding import SMALL_BODY_BYTES, check_structure, decode_body
from penstock.frontend.schemas.generation import SchedulingBody
from penstock.frontend.schemas.ignored_fields import IGNORED_HEADER, IgnoredFields
from penstock.frontend.settings import WorkerLimits
from penstock.frontend.transport.errors import ApiError, ErrorKind, retry_later, shorten
from penstock.frontend.transport.exchange import Exchange
from penstock.frontend.transport.open_exchanges import OpenExchanges
from penstock.frontend.transport.sse import EventStream
from penstock.process.admission import TenantPlaces

Body = TypeVar("Body", bound=Struct)
Params = ParamSpec("Params")
Result = TypeVar("Result")

_BODY_TIMEOUT_S = 30.0
_UNUSABLE_RETRY_S = 60
_JSON_TYPES = (b"application/json", b"text/json")
_TAKE_PICTURES = (
    "/chat/completions",
    "/completion",
    "/responses",
    "/input_tokens",
    "/messages",
    "/count_tokens",
    "/chat",
    "/generate",
    "/tokenize",
    "/apply-template",
    "/quote",
    "/invocations",
)
"""The ends of the paths whose bodies may hold pictures; the others hold text, which has a smaller limit."""


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """Handed to every endpoint with its request."""

    models: ServedModels
    admission: Admission
    limits: WorkerLimits
    exchanges: OpenExchanges
    ignored_fields: IgnoredFields
    places_to_wait: TenantPlaces
    """Places of requests that wait for the first model."""

    async def receive_body(
        self,
        exchange: Exchange,
        decode: Callable[[bytes], Body],
        task: Task | Callable[[Body], Task] = "generate",
    ) -> tuple[Body, ServedModel, int]:
        """Admit the request; return its body, the model to use, and the body's size in bytes.

        The model is the one that the body names, or one that can do the task. Reports ignored fields. Raises ApiError,
        ClientGoneError.
        """
        body, num_bytes = await self.receive_alone(exchange, decode)
        is_streaming = getattr(body, "stream", None) is True
        needed: Task = task(body) if callable(task) else task
        served = await self.model_soon(
            exchange, needed, getattr(body, "model", None), is_streaming=is_streaming, body=body
        )
        return body, served, num_bytes

    async def receive_alone(self, exchange: Exchange, decode: Callable[[bytes], Body]) -> tuple[Body, int]:
        """Like `receive_body`, without the model."""
        data = await self._receive_data(exchange)
        body = await _decode(exchange, decode, data)
        if exchange.lingering is None:
            new = read_linger(exchange, body, data, self.limits.max_linger_s)
            if new is not None:
                exchange.lingering = await kept_or_anew(new, self.models.keepers, exchange.tenant)
        ignored = await self.ignored_fields.check(data, type(body), exchange.key_name)
        if ignored is not None:
            exchange.more_headers = (*exchange.more_headers, (IGNORED_HEADER, ignored))
        return body, len(data)

    async def receive(
        self,
        exchange: Exchange,
        decode: Callable[[bytes], Result],
        *,
        task: Task | Callable[[Result], Task] = "any",
        model_of: Callable[[Result], str | None],
    ) -> tuple[Result, ServedModel, int]:
        """Like `receive_body`, for input that is not one body. It does not report ignored fields."""
        data = await self._receive_data(exchange)
        decoded = await _decode(exchange, decode, data)
        needed: Task = task(decoded) if callable(task) else task
        return decoded, await self.model_soon(exchange, needed, model_of(decoded)), len(data)

    def report_left_out(self, exchange: Exchange, tools: list[tuple[str, str]]) -> None:
        """Report tools that are not offered to the model, by path and type, in the log and in the answer's header."""
        if tools:
            self.ignored_fields.log_left_out([kind for _, kind in tools], exchange.key_name)
            names = [path.encode() for path, _ in tools]
            others = [header for header in exchange.more_headers if header[0] != IGNORED_HEADER]
            known = [value for name, value in exchange.more_headers if name == IGNORED_HEADER]
            exchange.more_headers = (*others, (IGNORED_HEADER, b", ".join(known + names)))

    async def receive_command(self, exchange: Exchange, decode: Callable[[bytes], Body]) -> Body:
        """Return the body of a request that needs no model. Raises ApiError, ClientGoneError."""
        _check_content_type(exchange)
        self.admission.admit(exchange)
        data = await self._read_body(exchange)
        await check_structure(data)
        return decode(data)

    async def read_ahead(self, exchange: Exchange, decoder: Decoder[Body]) -> Body:
        """Decode the fields that choose an endpoint, which then receives the body as usual. Raises ApiError,
        ClientGoneError."""
        self._check_capacity(exchange)
        _check_content_type(exchange)
        data = await self._read_body(exchange)
        await check_structure(data)
        exchange.unread_body = data
        async with exchange.cancelled_on_disconnect():
            return await run_sized(len(data), decode_body, decoder, data)

    @property
    def takes_pictures(self) -> bool:
        """Whether a model that is served now does."""
        served = (keeper.current for keeper in self.models.keepers)
        return any(each is not None and each.takes_pictures for each in served)

    async def _read_body(self, exchange: Exchange) -> bytes:
        """Return the body without a byte order mark."""
        has_pictures = exchange.path.endswith(_TAKE_PICTURES) and self.takes_pictures
        max_bytes = self.limits.body_limit(has_pictures=has_pictures)
        data = await exchange.read_body(max_bytes=max_bytes, timeout_s=_BODY_TIMEOUT_S)
        return data.removeprefix(codecs.BOM_UTF8)

    async def _receive_data(self, exchange: Exchange) -> bytes:
        """Admit the request, then read its body. Raises ApiError, ClientGoneError."""
        if (lingering := exchange.lingering) is not None:  # it continues an answer that was admitted
            self._check_open_requests(exchange)
            self.admission.readmit(exchange)
            self.exchanges.take_place(exchange)
            return lingering.body
        self._check_capacity(exchange)
        _check_content_type(exchange)
        self.admission.admit(exchange)
        data = await self._read_body(exchange)
        self._check_open_requests(exchange)
        self.exchanges.take_place(exchange)
        await check_structure(data)
        return data

    def _check_capacity(self, exchange: Exchange) -> None:
        self._check_open_requests(exchange)
        if self.models.none_will_come():
            raise self._still_loading(self.models.generation)

    def _check_open_requests(self, exchange: Exchange) -> None:
        places = self.exchanges.places
        if not places.has(exchange.payer):
            message = f"too many open requests: the limit of this worker is {places.limit}; retry later"
            raise retry_later(ErrorKind.OVERLOADED, message, self.exchanges.retry_after_s())

    async def model_soon(
        self,
        exchange: Exchange,
        task: Task,
        requested: str | None = None,
        *,
        is_streaming: bool = False,
        body: Struct | None = None,
    ) -> ServedModel:
        """Return the model with this name or, without a name, one that can do the task.

        A worker that has just started waits for its backend first, as the client does later while no backend is ready;
        a stream sends keep-alive comments meanwhile. A sleeping model is woken, unless only its loaded tokenizer is
        needed; body has the request's time limit. Raises ApiError, ClientGoneError.
        """
        waited: ModelKeeper | None = None
        # The loaded model may differ from the one that the request names.
        while (keeper := self.models.find(task, requested)) is not waited:
            if keeper.waking is not None and (keeper.current is None or task != "any"):
                with self._waiting(exchange, keeper, is_streaming=is_streaming):
                    await self.wake(exchange, keeper, keeper.waking, body)
            elif keeper.current is None:
                with self._waiting(exchange, keeper, is_streaming=is_streaming):
                    await exchange.wait_for(keeper.settled, self.limits.hold_timeout_s)
            else:
                break
            waited = keeper
        served = keeper.current
        if served is None:
            raise self._still_loading(keeper) if keeper.failure is None else self._unusable(keeper.failure)
        backend = served.backend
        exchange.count_status = lambda status: backend.board.count_response(status)
        return served

    @contextlib.contextmanager
    def _waiting(self, exchange: Exchange, keeper: ModelKeeper, *, is_streaming: bool) -> Iterator[None]:
        """Hold a place among the requests that wait for a model.

        A stream sends comments meanwhile. Raises ApiError if there is no place.
        """
        if not self.places_to_wait.has(exchange.payer):
            raise self._still_loading(keeper)
        self.places_to_wait.take(exchange.payer)
        if is_streaming:
            EventStream(exchange, lambda: ())  # sets exchange.idle_action, which sends the comments
        try:
            yield
        finally:
            self.places_to_wait.release(exchange.payer)
            exchange.idle_action = None

    async def wake(
        self, exchange: Exchange, keeper: ModelKeeper, waking: WakingModel, body: Struct | None = None
    ) -> None:
        """Keep the model awake until the exchange ends. Raises ApiError, ClientGoneError."""
        waking.use()
        exchange.at_end.append(waking.done)
        deadline_s = read_request_policy(exchange, body).deadline_s if isinstance(body, SchedulingBody) else None
        left_s = math.inf if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        try:
            async with asyncio.timeout(min(left_s, self.limits.hold_timeout_s)), exchange.cancelled_on_disconnect():
                await waking.until_awake(lambda: keeper.current is not None or keeper.failure is not None)
        except TimeoutError:
            if left_s <= self.limits.hold_timeout_s:
                raise expired() from None
            raise self._still_loading(keeper) from None

    @staticmethod
    def _still_loading(keeper: ModelKeeper) -> ApiError:
        return retry_later(
            ErrorKind.UNAVAILABLE, "the model is still loading; retry later", keeper.backend.retry_after_s
        )

    @staticmethod
    def _unusable(reason: str) -> ApiError:
        return retry_later(ErrorKind.UNAVAILABLE, f"the model cannot be used: {reason}", _UNUSABLE_RETRY_S)


async def _decode(exchange: Exchange, decode: Callable[[bytes], Result], data: bytes) -> Result:
    """Decode a body; a large one in a thread, until the client hangs up. Raises ApiError, ClientGoneError."""
    if len(data) <= SMALL_BODY_BYTES:
        return decode(data)
    async with exchange.cancelled_on_disconnect():
        return await asyncio.to_thread(decode, data)


async def run_sized(
    num_bytes: int, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
) -> Result:
    """Call the function with its arguments; in a thread if num_bytes, the size of its input, would hold the loop."""
    if num_bytes <= SMALL_BODY_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def _check_content_type(exchange: Exchange) -> None:
    encoding = exchange.header(b"content-encoding")
    if encoding is not None and encoding.strip().lower() != b"identity":
        shown = shorten(encoding.decode("latin-1"))
        message = f"content-encoding: {shown} is not accepted; send the body uncompressed"
        raise ApiError(ErrorKind.UNSUPPORTED_BODY, message)
    declared = exchange.header(b"content-type")
    if declared is None:
        # A web page can make a browser send a body without a type to another site; any other client may omit it.
        if exchange.header(b"origin") is not None:
            raise ApiError(ErrorKind.UNSUPPORTED_BODY, "content-type: missing; it must be application/json")
    elif declared.partition(b";")[0].strip().lower() not in _JSON_TYPES:
        shown = shorten(declared.decode("latin-1"))
        raise ApiError(ErrorKind.UNSUPPORTED_BODY, f"content-type: must be application/json, got {shown}")
