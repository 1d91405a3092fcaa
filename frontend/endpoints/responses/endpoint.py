"""The Responses API: /v1/responses and what is below it."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import msgspec

from penstock.frontend.endpoints.chat_bodies import renamed
from penstock.frontend.endpoints.completions import answer_chat, check_model, render_chat
from penstock.frontend.endpoints.responses.background import BackgroundRun, EventLog
from penstock.frontend.endpoints.responses.items import RENAMED, as_chat, listed
from penstock.frontend.endpoints.responses.pending_response import PendingResponse
from penstock.frontend.endpoints.responses.truncation import fitted
from penstock.frontend.formats.responses import response_of_item
from penstock.frontend.schemas.chat import check_chat
from penstock.frontend.schemas.responses import ResponseItem, decode_responses
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, retry_later, shorten
from penstock.frontend.transport.exchange import ClientGoneError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from penstock.frontend.endpoints.responses.store import ResponseStore, StoredResponse
    from penstock.frontend.generation.served_model import ServedModel
    from penstock.frontend.schemas.chat import ChatBody
    from penstock.frontend.schemas.responses import ResponsesBody
    from penstock.frontend.transport.exchange import Exchange
    from penstock.shm.client import BackendClient

_log = logging.getLogger("penstock.responses")

MAX_IN_BACKGROUND = 64
"""Responses of one worker that run in the background at a time."""
MAX_STREAMED_IN_BACKGROUND = 8
"""Of these, those whose events are kept; see `MAX_LOG_BYTES`."""
_PATH = "/v1/responses/"
_MAX_QUERY_FIELDS = 16
_ITEMS_PER_PAGE = 20
_MOST_ITEMS_PER_PAGE = 100


class Responses:
    """One worker's. A response lives in the worker that made it: in its store, or as a run of its own until then."""

    def __init__(self, store: ResponseStore, open_exchanges: set[Exchange]) -> None:
        """A background run's exchange is among the open ones: it counts, is drained and is ended with them."""
        self._store = store
        self._open_exchanges = open_exchanges
        self._runs: dict[str, BackgroundRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def create(self, exchange: Exchange, data: bytes, served: ServedModel, backend: BackendClient) -> None:
        """POST /v1/responses. Raises ApiError, ClientGoneError."""
        body = decode_responses(data)
        previous = self._previous(exchange.tenant, body)
        chat = self._chat(exchange.tenant, body, previous)
        size = len(data) + (0 if previous is None else previous.num_message_bytes)
        if body.truncation == "auto":
            with renamed(RENAMED):
                check_model(chat.model, served.card)
                async with exchange.attended():
                    chat = await fitted(chat, served)
        answer = PendingResponse(self._store, exchange.tenant, body, previous, served.card)
        if body.background:
            self._check_room(is_streamed=body.stream is True)
            run = BackgroundRun(exchange, answer, keeps_events=body.stream is True)
            chat.stream = True
            work = partial(answer_chat, run.exchange, chat, served, backend, self._id_prefix, answer.make_format)
            await self._start(exchange, run, work(size=size))
            return
        with renamed(RENAMED):
            await answer_chat(exchange, chat, served, backend, self._id_prefix, answer.make_format, size=size)

    async def count_input(self, exchange: Exchange, data: bytes, served: ServedModel) -> None:
        """POST /v1/responses/input_tokens. Raises ApiError, ClientGoneError."""
        body = decode_responses(data)
        chat = self._chat(exchange.tenant, body, self._previous(exchange.tenant, body))
        with renamed(RENAMED):
            check_model(chat.model, served.card)
            prompt = await render_chat(chat, served, is_long=True)
        told = {"object": "response.input_tokens", "input_tokens": len(prompt)}
        await exchange.respond(200, msgspec.json.encode(told))

    async def retrieve(self, exchange: Exchange) -> None:
        """GET /v1/responses/ID. Raises ApiError, ClientGoneError."""
        response_id, query = _asked(exchange), _query(exchange)
        run = self._run_of(exchange.tenant, response_id)
        if query.get("stream") == "true":
            starting_after = _number(query, "starting_after", -1, 0, (1 << 31) - 1)
            await self._stream_again(exchange, response_id, starting_after)
        elif run is not None:
            await exchange.respond(200, run.snapshot())
        else:
            await exchange.respond(200, self._stored(exchange.tenant, response_id).body)

    async def delete(self, exchange: Exchange) -> None:
        """DELETE /v1/responses/ID: one that still runs is cancelled. Raises ApiError."""
        response_id = _asked(exchange)
        await self._cancel_run(exchange.tenant, response_id)
        if not self._store.remove(exchange.tenant, response_id):
            raise self._unknown(response_id, None)
        told = {"id": response_id, "object": "response", "deleted": True}
        await exchange.respond(200, msgspec.json.encode(told))

    async def cancel(self, exchange: Exchange) -> None:
        """POST /v1/responses/ID/cancel. One that has ended is told as it is. Raises ApiError."""
        response_id = _asked(exchange).removesuffix("/cancel")
        await self._cancel_run(exchange.tenant, response_id)
        stored = self._stored(exchange.tenant, response_id)
        if not stored.is_background:
            invalid(
                "response_id", "only a response made with background can be cancelled: close the connection instead"
            )
        await exchange.respond(200, stored.body)

    async def list_input(self, exchange: Exchange) -> None:
        """GET /v1/responses/ID/input_items: the request's own, in pages. Raises ApiError."""
        response_id = _asked(exchange).removesuffix("/input_items")
        query = _query(exchange)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            invalid("order", f'must be "asc" or "desc", got {shorten(order)}')
        limit = _number(query, "limit", _ITEMS_PER_PAGE, 1, _MOST_ITEMS_PER_PAGE)
        suffix = response_id.partition("_")[2]
        items = self._input_of(exchange.tenant, response_id)
        told = [listed(item, f"in_{suffix}_{place}") for place, item in enumerate(items)]
        if order == "desc":
            told.reverse()
        if (after := query.get("after")) is not None:
            ids = [item["id"] for item in told]
            if after not in ids:
                invalid("after", f"no item of this response has the id {shorten(after)}")
            told = told[ids.index(after) + 1 :]
        page = told[:limit]
        ends = (page[0]["id"], page[-1]["id"]) if page else ("", "")
        listing = {"object": "list", "data": page, "first_id": ends[0], "last_id": ends[1]}
        await exchange.respond(200, msgspec.json.encode(listing | {"has_more": len(told) > limit}))

    @property
    def _id_prefix(self) -> str:
        return f"resp_{self._store.tag}"

    def _previous(self, tenant: bytes, body: ResponsesBody) -> StoredResponse | None:
        """The response that the request continues. Raises ApiError."""
        response_id = body.previous_response_id
        if response_id is None:
            return None
        if self._run_of(tenant, response_id) is not None:
            invalid("previous_response_id", "this response has not ended yet")
        return self._stored(tenant, response_id, "previous_response_id")

    def _chat(self, tenant: bytes, body: ResponsesBody, previous: StoredResponse | None) -> ChatBody:
        """The request as a chat. Raises ApiError."""
        if isinstance(body.input, list):
            outputs: dict[str, dict[str | None, ResponseItem]] = {}
            body.input = [self._resolved(tenant, place, item, outputs) for place, item in enumerate(body.input)]
        chat = as_chat(body, () if previous is None else previous.messages)
        with renamed(RENAMED):
            check_chat(chat)
        return chat

    # What is kept

    def _resolved(
        self, tenant: bytes, place: int, item: ResponseItem, outputs: dict[str, dict[str | None, ResponseItem]]
    ) -> ResponseItem:
        """The output of a kept response that the item refers to, if it does. outputs: of those decoded so far."""
        if item.kind != "item_reference" or item.id is None:
            return item
        param, response_id = f"input[{place}].id", response_of_item(item.id)
        if response_id not in outputs:
            output = _output.decode(self._stored(tenant, response_id, param).body).output
            outputs[response_id] = {other.id: other for other in output}
        found = outputs[response_id].get(item.id)
        if found is None:
            invalid(param, f"{shorten(response_id)} has no item {shorten(item.id)}")
        return found

    def _stored(self, tenant: bytes, response_id: str, param: str | None = None) -> StoredResponse:
        stored = self._store.get(tenant, response_id)
        if stored is None:
            raise self._unknown(response_id, param)
        return stored

    def _input_of(self, tenant: bytes, response_id: str) -> Sequence[ResponseItem]:
        run = self._run_of(tenant, response_id)
        if run is not None:
            return run.answer.input_items
        return _items.decode(self._stored(tenant, response_id).input_items)

    def _unknown(self, response_id: str, param: str | None) -> ApiError:
        if response_id.startswith("resp_") and not response_id.startswith(self._id_prefix):
            why = (
                "it was made by another process: each worker keeps its own, and loses them when it ends. "
                "Run one worker, route a conversation to one, or send the whole conversation as input"
            )
        else:
            why = f"it was deleted, was not used for {self._store.max_idle_s:g} s, had to make room, or never was"
        message = f"no response {shorten(response_id)} is kept here: {why}"
        return ApiError(ErrorKind.UNKNOWN_RESPONSE, message, param=param)

    # What runs in the background

    def _check_room(self, *, is_streamed: bool) -> None:
        num_streamed = sum(run.events is not None for run in self._runs.values())
        if len(self._tasks) >= MAX_IN_BACKGROUND:
            raise retry_later(ErrorKind.OVERLOADED, f"{MAX_IN_BACKGROUND} responses run in the background already", 1)
        if is_streamed and num_streamed >= MAX_STREAMED_IN_BACKGROUND:
            message = f"{MAX_STREAMED_IN_BACKGROUND} responses are streamed in the background already"
            raise retry_later(ErrorKind.OVERLOADED, message, 1)

    async def _start(self, exchange: Exchange, run: BackgroundRun, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(self._run(run, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await run.begun.wait()
        if not run.is_submitted:
            with renamed(RENAMED):
                raise run.error or ApiError(ErrorKind.INTERNAL, "an internal error occurred")
        if run.events is not None:
            await run.events.follow(exchange, -1)
        else:
            await exchange.respond(200, run.snapshot())

    async def _run(self, run: BackgroundRun, work: Coroutine[None, None, None]) -> None:
        self._open_exchanges.add(run.exchange)
        run.on_submitted = lambda: self._runs.__setitem__(run.response_id, run)
        try:
            await run.run(work)
            if run.error is not None and not isinstance(run.error, ApiError | ClientGoneError):
                _log.error("%s failed", run.exchange.request_id, exc_info=run.error)
            if run.is_submitted:
                run.conclude()
        finally:
            self._open_exchanges.discard(run.exchange)
            if run.is_submitted:
                del self._runs[run.response_id]

    def _run_of(self, tenant: bytes, response_id: str) -> BackgroundRun | None:
        run = self._runs.get(response_id)
        return run if run is not None and run.exchange.tenant == tenant else None

    async def _cancel_run(self, tenant: bytes, response_id: str) -> None:
        run = self._run_of(tenant, response_id)
        if run is not None:
            run.cancel()
            await run.ended.wait()

    async def _stream_again(self, exchange: Exchange, response_id: str, starting_after: int) -> None:
        run = self._run_of(exchange.tenant, response_id)
        if run is not None:
            log = run.events
        else:
            events = self._stored(exchange.tenant, response_id).events
            log = None if events is None else EventLog(events, is_complete=True)
        if log is None:
            invalid("stream", "only a response made with background and stream can be streamed again")
        await log.follow(exchange, starting_after)


class _Output(msgspec.Struct):
    """Of a response object, what can be referred to."""

    output: list[ResponseItem]


_output = msgspec.json.Decoder(_Output)
_items = msgspec.json.Decoder(list[ResponseItem])


def _asked(exchange: Exchange) -> str:
    """What stands behind /v1/responses/ in the path."""
    return exchange.path.removeprefix(_PATH)


def _query(exchange: Exchange) -> dict[str, str]:
    try:
        return dict(parse_qsl(exchange.query.decode("latin-1"), max_num_fields=_MAX_QUERY_FIELDS))
    except ValueError:
        raise ApiError(ErrorKind.INVALID_VALUE, f"the query has more than {_MAX_QUERY_FIELDS} fields") from None


def _number(query: dict[str, str], field: str, default: int, least: int, most: int) -> int:
    value = query.get(field)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) <= len(str(most)) and least <= int(value) <= most):
        invalid(field, f"must be a number from {least} to {most}, got {shorten(value)}")
    return int(value)
