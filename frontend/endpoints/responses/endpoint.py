"""The Responses API: POST /v1/responses and the paths below it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import msgspec

from penstock.frontend.endpoints.answering import AnswerStyle, answer_chat
from penstock.frontend.endpoints.chat_translation import renamed
from penstock.frontend.endpoints.models import check_model
from penstock.frontend.endpoints.prompts import render_chat
from penstock.frontend.endpoints.responses.background import BackgroundRun, BackgroundRuns
from penstock.frontend.endpoints.responses.event_log import EventLog
from penstock.frontend.endpoints.responses.items import RENAMED, as_chat, listed
from penstock.frontend.endpoints.responses.kept_responses import KeptResponses
from penstock.frontend.endpoints.responses.pending_response import PendingResponse
from penstock.frontend.endpoints.responses.truncation import fitted
from penstock.frontend.schemas.chat import check_chat
from penstock.frontend.schemas.responses import ResponsesBody, decode_responses
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.frontend.endpoints.context import EndpointContext
    from penstock.frontend.endpoints.responses.store import ResponseStore, StoredResponse
    from penstock.frontend.schemas.chat import ChatBody
    from penstock.frontend.schemas.responses import ResponseItem
    from penstock.frontend.transport.exchange import Exchange
    from penstock.frontend.transport.open_exchanges import OpenExchanges

_PATH = "/v1/responses/"
_MAX_QUERY_FIELDS = 16
_ITEMS_PER_PAGE = 20
_MAX_ITEMS_PER_PAGE = 100


class Responses:
    """The endpoints of one worker. A response belongs to the worker that made it: as a background run, then in its
    store."""

    def __init__(self, store: ResponseStore, open_exchanges: OpenExchanges) -> None:
        self._kept = KeptResponses(store)
        self._runs = BackgroundRuns(open_exchanges)

    async def create(self, exchange: Exchange, context: EndpointContext) -> None:
        """POST /v1/responses. Raises ApiError, ClientGoneError."""
        data, served = await context.receive(exchange, ResponsesBody)
        body = decode_responses(data)
        previous = self._previous(exchange.tenant, body)
        chat = self._chat(exchange.tenant, body, previous)
        num_body_bytes = len(data) + (0 if previous is None else previous.num_message_bytes)
        if body.truncation == "auto":
            with renamed(RENAMED):
                check_model(chat.model, served.card)
                async with exchange.cancelled_on_disconnect():
                    chat = await fitted(chat, served)
        pending = PendingResponse(self._kept.store, exchange.tenant, body, previous, served.card)
        style = AnswerStyle(self._kept.id_prefix, pending.make_format)

        async def answer(client: Exchange) -> None:
            await answer_chat(client, chat, served, context.backend, style, num_body_bytes=num_body_bytes)

        if not body.background:
            with renamed(RENAMED):
                await answer(exchange)
            return
        self._runs.check_capacity(is_streamed=body.stream is True)
        run = BackgroundRun(exchange, pending, keeps_events=body.stream is True)
        chat.stream = True
        with renamed(RENAMED):
            await self._runs.start(run, answer(run.exchange))
        if run.events is not None:
            await run.events.follow(exchange, -1)
        else:
            await exchange.respond(200, run.snapshot())

    async def count_input(self, exchange: Exchange, context: EndpointContext) -> None:
        """POST /v1/responses/input_tokens. Raises ApiError, ClientGoneError."""
        data, served = await context.receive(exchange)
        async with exchange.cancelled_on_disconnect():
            body = decode_responses(data)
            chat = self._chat(exchange.tenant, body, self._previous(exchange.tenant, body))
            with renamed(RENAMED):
                check_model(chat.model, served.card)
                prompt = await render_chat(chat, served, is_long=True)
            answer = {"object": "response.input_tokens", "input_tokens": len(prompt)}
            await exchange.respond(200, msgspec.json.encode(answer))

    async def retrieve(self, exchange: Exchange, _context: EndpointContext) -> None:
        """GET /v1/responses/ID. Raises ApiError, ClientGoneError."""
        response_id, query = _path_below(exchange), _query(exchange)
        run = self._runs.find(exchange.tenant, response_id)
        if query.get("stream") == "true":
            starting_after = _number(query, "starting_after", -1, 0, (1 << 31) - 1)
            await self._event_log(exchange.tenant, response_id).follow(exchange, starting_after)
        elif run is not None:
            await exchange.respond(200, run.snapshot())
        else:
            await exchange.respond(200, self._kept.find(exchange.tenant, response_id).body)

    async def delete(self, exchange: Exchange, _context: EndpointContext) -> None:
        """DELETE /v1/responses/ID: one that still runs is cancelled. Raises ApiError."""
        response_id = _path_below(exchange)
        await self._runs.cancel(exchange.tenant, response_id)
        self._kept.remove(exchange.tenant, response_id)
        answer = {"id": response_id, "object": "response", "deleted": True}
        await exchange.respond(200, msgspec.json.encode(answer))

    async def cancel(self, exchange: Exchange, _context: EndpointContext) -> None:
        """POST /v1/responses/ID/cancel. A response that has ended is returned as it is. Raises ApiError."""
        response_id = _path_below(exchange).removesuffix("/cancel")
        await self._runs.cancel(exchange.tenant, response_id)
        stored = self._kept.find(exchange.tenant, response_id)
        if not stored.is_background:
            invalid(
                "response_id", "only a response made with background can be cancelled: close the connection instead"
            )
        await exchange.respond(200, stored.body)

    async def list_input(self, exchange: Exchange, _context: EndpointContext) -> None:
        """GET /v1/responses/ID/input_items: the request's own items, in pages. Raises ApiError."""
        response_id = _path_below(exchange).removesuffix("/input_items")
        query = _query(exchange)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            invalid("order", f'must be "asc" or "desc", got {shorten(order)}')
        limit = _number(query, "limit", _ITEMS_PER_PAGE, 1, _MAX_ITEMS_PER_PAGE)
        run = self._runs.find(exchange.tenant, response_id)
        if run is not None:
            items: Sequence[ResponseItem] = run.pending.input_items
        else:
            items = self._kept.input_items(exchange.tenant, response_id)
        suffix = response_id.partition("_")[2]
        listing = [listed(item, f"in_{suffix}_{position}") for position, item in enumerate(items)]
        if order == "desc":
            listing.reverse()
        if (after := query.get("after")) is not None:
            ids = [item["id"] for item in listing]
            if after not in ids:
                invalid("after", f"no item of this response has the id {shorten(after)}")
            listing = listing[ids.index(after) + 1 :]
        page = listing[:limit]
        ends = (page[0]["id"], page[-1]["id"]) if page else ("", "")
        answer = {"object": "list", "data": page, "first_id": ends[0], "last_id": ends[1]}
        await exchange.respond(200, msgspec.json.encode(answer | {"has_more": len(listing) > limit}))

    def _previous(self, tenant: bytes, body: ResponsesBody) -> StoredResponse | None:
        """Return the response that the request continues. Raises ApiError."""
        response_id = body.previous_response_id
        if response_id is None:
            return None
        if self._runs.find(tenant, response_id) is not None:
            invalid("previous_response_id", "this response has not ended yet")
        return self._kept.find(tenant, response_id, "previous_response_id")

    def _chat(self, tenant: bytes, body: ResponsesBody, previous: StoredResponse | None) -> ChatBody:
        """Return the request as a chat. Raises ApiError."""
        if isinstance(body.input, list):
            body.input = self._kept.resolved(tenant, body.input)
        chat = as_chat(body, () if previous is None else previous.messages)
        with renamed(RENAMED):
            check_chat(chat)
        return chat

    def _event_log(self, tenant: bytes, response_id: str) -> EventLog:
        """Return the events of a response that runs or is kept. Raises ApiError."""
        run = self._runs.find(tenant, response_id)
        if run is not None:
            log = run.events
        else:
            events = self._kept.find(tenant, response_id).events
            log = None if events is None else EventLog(events, is_complete=True)
        if log is None:
            invalid("stream", "only a response made with background and stream can be streamed again")
        return log


def _path_below(exchange: Exchange) -> str:
    """Return what follows /v1/responses/ in the path."""
    return exchange.path.removeprefix(_PATH)


def _query(exchange: Exchange) -> dict[str, str]:
    try:
        return dict(parse_qsl(exchange.query.decode("latin-1"), max_num_fields=_MAX_QUERY_FIELDS))
    except ValueError:
        message = f"the query has more than {_MAX_QUERY_FIELDS} fields, the limit"
        raise ApiError(ErrorKind.INVALID_VALUE, message) from None


def _number(query: dict[str, str], field: str, default: int, least: int, most: int) -> int:
    value = query.get(field)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) <= len(str(most)) and least <= int(value) <= most):
        invalid(field, f"must be a number from {least} to {most}, got {shorten(value)}")
    return int(value)
