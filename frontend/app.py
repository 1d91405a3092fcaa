"""The ASGI application: routes, keys, admission, and the one place where errors become answers."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.access.admission import Admission
from penstock.frontend.endpoints import completions, messages, reference
from penstock.frontend.endpoints import utilities as utility_endpoints
from penstock.frontend.endpoints.openapi import Pages
from penstock.frontend.endpoints.responses.endpoint import Responses
from penstock.frontend.endpoints.responses.store import ResponseStore
from penstock.frontend.endpoints.routes import Methods, Route, pattern, reading
from penstock.frontend.schemas.unknown_fields import check_unknown_fields
from penstock.frontend.telemetry import metrics
from penstock.frontend.transport.errors import ApiError, ErrorKind, retry_later, shorten, shutting_down
from penstock.frontend.transport.exchange import ClientGoneError, Exchange

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.frontend.endpoints.reference import Doc
    from penstock.frontend.generation.served_model import ModelKeeper, ServedModel
    from penstock.frontend.settings import WorkerLimits
    from penstock.frontend.transport.exchange import Receive, Scope, Send
    from penstock.shm.client import BackendClient

_log = logging.getLogger("penstock.app")

_BODY_TIMEOUT_S = 30.0
_DRAINED_BODY_TIMEOUT_S = 1.0
"""What a body gets that is on its way when the server is told to stop."""
_MODEL_TIMEOUT_S = 2.0
"""How long a request waits for a model that is about to be there."""
_SWEEP_S = 1.0
_READY_PATH = "/ready"
_SHOWN_COUNTERS = ("running", "waiting", "pages_used", "pages_total")
_JSON_TYPES = (b"application/json", b"text/json")


class App:
    """One worker's application. `run` must be running beside it."""

    def __init__(
        self, backend: BackendClient, models: ModelKeeper, *, admission: Admission | None = None, limits: WorkerLimits
    ) -> None:
        """Without admission all may ask."""
        self._backend = backend
        self._models = models
        self._admission = admission or Admission()
        self._limits = limits
        self._open: set[Exchange] = set()
        self._draining = False
        self._idle_actions: set[asyncio.Task[None]] = set()
        store = ResponseStore(
            max_bytes=limits.max_stored_response_bytes,
            max_responses=limits.max_stored_responses,
            max_idle_s=limits.stored_response_idle_s,
        )
        responses = Responses(store, self._open)
        utilities = utility_endpoints
        self.routes: dict[str, Methods] = {
            "/v1/chat/completions": self._generating(completions.chat_completion, reference.CHAT),
            "/v1/completions": self._generating(completions.completion, reference.COMPLETION),
            "/v1/responses": self._generating(responses.create, reference.RESPONSE),
            "/v1/messages": self._generating(messages.create_message, reference.MESSAGE),
            "/v1/responses/{response_id}": {
                **reading(responses.retrieve, reference.RETRIEVE),
                "DELETE": Route(responses.delete, reference.DELETE),
            },
            "/v1/responses/{response_id}/cancel": {"POST": Route(responses.cancel, reference.CANCEL)},
            "/v1/responses/{response_id}/input_items": reading(responses.list_input, reference.INPUT_ITEMS),
            "/v1/responses/input_tokens": self._with_body(responses.count_input, reference.COUNT_RESPONSE),
            "/v1/messages/count_tokens": self._with_body(messages.count_tokens, reference.COUNT_MESSAGE),
            "/tokenize": self._with_body(utilities.tokenize, reference.TOKENIZE),
            "/detokenize": self._with_body(utilities.detokenize, reference.DETOKENIZE),
            "/apply-template": self._with_body(utilities.apply_template, reference.TEMPLATE),
            "/v1/models": reading(self._list_models, reference.MODELS),
            "/v1/models/{model}": reading(self._describe_model, reference.MODEL),
            "/version": reading(utilities.version, reference.VERSION),
            "/v1/load": reading(self._load, reference.LOAD),
            "/health": reading(self._health, reference.HEALTH, needs_key=False),
            _READY_PATH: reading(self._ready, reference.READY, needs_key=False),
            "/metrics": reading(self._metrics, reference.METRICS, needs_key=False),
        }
        pages = Pages(self.routes, utilities.VERSION)
        self.routes |= {
            "/openapi.json": reading(pages.document, reference.DOCUMENT, needs_key=False),
            "/docs": reading(pages.page, reference.PAGE, needs_key=False),
            "/docs/page.js": reading(pages.script, reference.PAGE_SCRIPT, needs_key=False),
            "/docs/page.css": reading(pages.style, reference.PAGE_STYLE, needs_key=False),
        }
        self._patterns = [
            (matcher, methods) for path, methods in self.routes.items() if (matcher := pattern(path)) is not None
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"not an HTTP scope: {scope['type']}")
        exchange = Exchange(scope, receive, send)
        self._open.add(exchange)
        try:
            await self._answer(exchange)
        except ClientGoneError:
            _log.debug("the client of %s went away", exchange.request_id)
        finally:
            self._open.discard(exchange)
            if exchange.status is not None:
                self._backend.board.count_response(exchange.status)
            exchange.finish()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def start_draining(self) -> None:
        """From now on /ready and new requests are answered 503, bodies must be there soon; what runs goes on."""
        self._draining = True
        asyncio.get_running_loop().call_later(_DRAINED_BODY_TIMEOUT_S, self._end_unread)

    def _end_unread(self) -> None:
        for exchange in list(self._open):
            if exchange.is_reading:
                exchange.abort(shutting_down())

    def end_all(self) -> None:
        """Every open request ends now with an error that says the server is shutting down."""
        for exchange in list(self._open):
            exchange.abort(shutting_down())

    async def run(self) -> None:
        """Looks after the connections that send nothing or take nothing. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._limits.keep_alive_interval_s / 2))
            self.sweep(time.monotonic())

    def sweep(self, now_s: float) -> None:
        for exchange in list(self._open):
            if exchange.sending_since_s:
                if now_s - exchange.sending_since_s >= self._limits.client_timeout_s:
                    exchange.drop()
            elif exchange.idle_action and now_s - exchange.last_sent_s >= self._limits.keep_alive_interval_s:
                task = asyncio.ensure_future(exchange.idle_action())
                self._idle_actions.add(task)
                task.add_done_callback(self._idle_actions.discard)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            exchange.more_headers = self._admission.cors.headers(exchange)
            self._admission.check_host(exchange)
            methods = self._methods(exchange.path)
            if (allowed := self._admission.cors.preflight(exchange, methods)) is not None:
                await exchange.start(204, allowed)
                await exchange.send(b"", more=False)
                return
            route = _route(exchange, methods)
            if route.needs_key:
                self._admission.identify(exchange)
            await route.handler(exchange)
        except ApiError as error:
            if exchange.started:
                _log.error("%s failed after its answer began: %s", exchange.request_id, error.message)
                exchange.drop()
                return
            _log.log(
                # Probes ask many times a second while the backend loads.
                logging.DEBUG if exchange.path == _READY_PATH else logging.INFO,
                "refused %s: %d %s %s",
                exchange.request_id,
                error.kind.status,
                error.kind.name,
                error.param or "",
            )
            await exchange.respond_error(error)
        except ClientGoneError:
            raise
        except Exception:  # noqa: BLE001 - logged with its trace
            # Our own bug. The client learns that it was one, the log learns which.
            _log.exception("%s %s failed", exchange.method, shorten(exchange.path))
            if exchange.started:
                exchange.drop()
                return
            await exchange.respond_error(ApiError(ErrorKind.INTERNAL, "an internal error occurred"))

    def _methods(self, path: str) -> dict[str, Route]:
        methods = self.routes.get(path)
        if methods is None:
            methods = next((methods for matcher, methods in self._patterns if matcher.fullmatch(path)), None)
        if methods is None:
            raise ApiError(ErrorKind.UNKNOWN_PATH, f"no such path: {shorten(path)}")
        return methods

    async def _health(self, exchange: Exchange) -> None:
        await exchange.respond(200, b'{"status":"ok"}')

    async def _ready(self, exchange: Exchange) -> None:
        if self._draining:
            raise shutting_down()
        if not self._backend.ready:
            raise retry_later(ErrorKind.UNAVAILABLE, "the backend is not connected or makes no progress", 1)
        self._served()
        counters = self._backend.backend_counters or {}
        shown = {name: counters[name] for name in _SHOWN_COUNTERS if name in counters}
        await exchange.respond(200, msgspec.json.encode({"status": "ready"} | shown))

    async def _metrics(self, exchange: Exchange) -> None:
        page = metrics.render(os.getpid(), self._backend.counters, self._backend.backend_counters)
        await exchange.respond(200, page, content_type=metrics.CONTENT_TYPE)

    async def _list_models(self, exchange: Exchange) -> None:
        served = await self._served_soon(exchange)
        model_id = served.card.model_id
        pages = {"has_more": False, "first_id": model_id, "last_id": model_id}  # Anthropic's
        body = {"object": "list", "data": [_describe(served)], **pages}
        await exchange.respond(200, msgspec.json.encode(body))

    async def _describe_model(self, exchange: Exchange) -> None:
        served = await self._served_soon(exchange)
        asked = exchange.path.removeprefix("/v1/models/")
        if asked != served.card.model_id:
            message = f"model: {shorten(asked)} does not exist; this server has {shorten(served.card.model_id)}"
            raise ApiError(ErrorKind.UNKNOWN_MODEL, message, param="model")
        await exchange.respond(200, msgspec.json.encode(_describe(served)))

    async def _load(self, exchange: Exchange) -> None:
        await utility_endpoints.load(exchange, self._backend, len(self._open))

    def _generating(
        self, answer: Callable[[Exchange, bytes, ServedModel, BackendClient], Awaitable[None]], doc: Doc
    ) -> Methods:
        async def handle(exchange: Exchange) -> None:
            data = await self._admit(exchange)
            if doc.body is not None:
                refuses = self._limits.refuses_unknown_fields
                check_unknown_fields(data, doc.body, exchange.request_id, refuses=refuses)
            await answer(exchange, data, await self._served_soon(exchange), self._backend)

        return {"POST": Route(handle, doc)}

    def _with_body(self, answer: Callable[[Exchange, bytes, ServedModel], Awaitable[None]], doc: Doc) -> Methods:
        async def handle(exchange: Exchange) -> None:
            data = await self._admit(exchange)
            served = await self._served_soon(exchange)
            async with exchange.attended():
                await answer(exchange, data, served)

        return {"POST": Route(handle, doc)}

    async def _admit(self, exchange: Exchange) -> bytes:
        """The body of a request that may run. All that can be refused is refused before the body is read."""
        if self._draining:
            raise shutting_down()
        if len(self._open) > self._limits.max_open_requests:
            raise retry_later(ErrorKind.OVERLOADED, "too many open requests", 1)
        if self._models.settled.is_set():
            self._served()
        _check_content_type(exchange)
        self._admission.admit(exchange)
        return await exchange.read_body(max_bytes=self._limits.max_body_bytes, timeout_s=_BODY_TIMEOUT_S)

    async def _served_soon(self, exchange: Exchange) -> ServedModel:
        """Waits where there will be a model in a moment, as in a worker that has just started."""
        if self._models.current is None:
            await exchange.wait_for(self._models.settled, _MODEL_TIMEOUT_S)
        return self._served()

    def _served(self) -> ServedModel:
        served = self._models.current
        if served is None:
            raise retry_later(ErrorKind.UNAVAILABLE, "the model is still loading", 2)
        return served


def _route(exchange: Exchange, methods: dict[str, Route]) -> Route:
    route = methods.get(exchange.method)
    if route is None:
        allowed = ", ".join(methods)
        raise ApiError(
            ErrorKind.WRONG_METHOD,
            f"{exchange.method[:20]} is not allowed here; allowed: {allowed}",
            headers=((b"allow", allowed.encode()),),
        )
    return route


def _check_content_type(exchange: Exchange) -> None:
    encoding = exchange.header(b"content-encoding")
    if encoding is not None and encoding.strip().lower() != b"identity":
        raise ApiError(ErrorKind.UNSUPPORTED_BODY, "compressed bodies are not accepted")
    declared = exchange.header(b"content-type")
    if declared is None:
        # A browser may send a body without a type to another site unasked; every other client may leave it out.
        is_json = exchange.header(b"origin") is None
    else:
        is_json = declared.partition(b";")[0].strip().lower() in _JSON_TYPES
    if not is_json:
        raise ApiError(ErrorKind.UNSUPPORTED_BODY, "content-type: the body must be application/json")


def _describe(served: ServedModel) -> dict[str, object]:
    """OpenAI's model object and Anthropic's in one."""
    card = served.card
    return {
        "id": card.model_id,
        "object": "model",
        "type": "model",
        "display_name": card.model_id,
        "created": card.created,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "owned_by": "penstock",
        "max_model_len": card.max_context_tokens,
        "vocab_size": card.vocab_size,
    }
