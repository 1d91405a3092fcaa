"""The Responses API: POST /v1/responses and the paths below it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from functools import partial
from urllib.parse import parse_qsl

import msgspec

from penstock.frontend.endpoints.answering import AnswerStyle, answer_chat
from penstock.frontend.endpoints.chat_translation import renamed
from penstock.frontend.endpoints.context import EndpointContext, run_sized
from penstock.frontend.endpoints.prompts import render_chat
from penstock.frontend.endpoints.responses.background.event_log import Followers
from penstock.frontend.endpoints.responses.background.run import BackgroundRun
from penstock.frontend.endpoints.responses.background.runs import BackgroundRuns
from penstock.frontend.endpoints.responses.background.takeover import Restart, Takeovers, encode_request
from penstock.frontend.endpoints.responses.background_places import BackgroundClaim
from penstock.frontend.endpoints.responses.items import RENAMED, as_chat, fitted, listed
from penstock.frontend.endpoints.responses.kept_responses import KeptResponses
from penstock.frontend.endpoints.responses.pending_response import PendingResponse
from penstock.frontend.endpoints.responses.storage.store import ResponseStore, StoredResponse
from penstock.frontend.endpoints.responses.storage.stored_messages import decode_messages
from penstock.frontend.endpoints.responses.web_socket import Turn
from penstock.frontend.endpoints.server.streams import find_stream
from penstock.frontend.formats.base import Identity, StreamUsageOptions, Usage
from penstock.frontend.formats.compaction import REQUEST, CompactionFormat
from penstock.frontend.formats.openai_chunks import DONE
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.schemas.chat import ChatBody, ChatMessage, check_chat, text_of
from penstock.frontend.schemas.response_tools import left_out_tools
from penstock.frontend.schemas.responses import ResponsesBody, decode_responses
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, retry_later, shorten
from penstock.frontend.transport.exchange import Exchange
from penstock.frontend.transport.open_exchanges import OpenExchanges
from penstock.frontend.transport.sse import EventStream
from penstock.process.logs import RareLine

logger = logging.getLogger("penstock.responses")

_PATH = "/v1/responses/"
_NOT_STORED_HEADER = b"x-penstock-not-stored"
_MAX_QUERY_FIELDS = 16
_ITEMS_PER_PAGE = 20
_MAX_ITEMS_PER_PAGE = 100
_SWEEPS_EVERY_S = 60.0
_SCRUBS_EVERY_S = 1.0
_CANCEL_TIMEOUT_S = 10.0
_CANCEL_LOOKS_EVERY_S = 0.1


class Responses:
    """The endpoints of one worker.

    A background response runs in the worker that made it. Other workers see and cancel it through the shared store, and
    take it over if the worker ends.
    """

    def __init__(self, store: ResponseStore, open_exchanges: OpenExchanges) -> None:
        self._kept = KeptResponses(store)
        self._runs = BackgroundRuns(open_exchanges, store)
        self._followers = Followers(store, open_exchanges)
        self._is_to_scrub = asyncio.Event()
        self._not_stored = RareLine(logger, logging.WARNING)

    async def run(self, context: EndpointContext) -> None:
        """Drop expired responses, and take over those that other workers left. Runs until it is cancelled."""
        takeovers = Takeovers(self._kept.store, self._runs.places, partial(self._run_again, context))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep())
            group.create_task(takeovers.run(context))

    async def stop(self) -> None:
        """Leave the responses that run in the background to other workers, where the store is shared."""
        await self._runs.stop()

    async def _sweep(self) -> None:
        store = self._kept.store
        while True:
            with contextlib.suppress(ApiError):  # the database has logged it
                await store.sweep()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_to_scrub.wait(), _SWEEPS_EVERY_S)
                self._is_to_scrub.clear()
                await store.scrub()
                await asyncio.sleep(_SCRUBS_EVERY_S)

    async def create(self, exchange: Exchange, context: EndpointContext, turn: Turn | None = None) -> None:
        """POST /v1/responses, or a turn of a WebSocket. Raises ApiError, ClientGoneError."""
        body, served, num_sent_bytes = await context.receive_body(exchange, decode_responses)
        context.report_left_out(exchange, left_out_tools(body.tools))
        if turn is not None:  # its events are messages of the socket
            exchange.lingering = None
        if body.background and body.seed is None:  # so that a run in another worker draws the same tokens
            body.seed = secrets.randbits(63)
        previous = await self._previous(exchange.tenant, body, turn)
        async with exchange.cancelled_on_disconnect():
            chat, num_body_bytes = await self._chat(exchange.tenant, body, previous, num_sent_bytes)
        if body.truncation == "auto":
            with renamed(RENAMED):
                async with exchange.cancelled_on_disconnect():
                    chat = await fitted(chat, served, exchange.tenant)
        pending = PendingResponse(body, previous, served.card, is_continuable=turn is not None)
        if turn is not None and not turn.generates:
            await self._keep_unanswered(exchange, pending, served, turn)
            return
        if not body.background:
            keep = partial(self._keep, exchange, pending, turn)
            style = AnswerStyle(self._kept.id_prefix, pending.make_format, keep, farewell=DONE)
            with renamed(RENAMED):
                await answer_chat(exchange, chat, served, style, num_body_bytes=num_body_bytes)
            return
        request = await run_sized(num_sent_bytes, encode_request, body, exchange)
        num_input_bytes = num_sent_bytes + len(request) + await run_sized(num_body_bytes, pending.encode_input)
        claim = BackgroundClaim.of(exchange.payer, num_input_bytes, is_streamed=body.stream is True)
        run = BackgroundRun(exchange, pending, self._kept.store, claim, request=request)

        with renamed(RENAMED):
            await self._runs.start(run, partial(self._answer, run, chat, served, num_body_bytes))
        if run.events is not None:
            await self._followers.follow(exchange, run.response_id, run.events, -1)
        else:
            await exchange.respond(200, run.snapshot())

    def _run_again(
        self, context: EndpointContext, restart: Restart, claim: BackgroundClaim, served: ServedModel
    ) -> None:
        """Run a response that another worker began. It keeps its id and its time."""
        earlier, body = restart.earlier, restart.body
        pending = PendingResponse(body, None, served.card, encoded=(earlier.input_items, earlier.message_data))
        client = restart.request.client(earlier.tenant)
        context.admission.readmit(client)
        run = BackgroundRun(client, pending, self._kept.store, claim, earlier=earlier)
        client.finish()

        async def work() -> None:
            num_bytes = len(earlier.request) + len(earlier.message_data)
            chat = await run_sized(num_bytes, lambda: as_chat(body, decode_messages(earlier.message_data)))
            with renamed(RENAMED):
                await run_sized(num_bytes, check_chat, chat)
                if body.truncation == "auto":
                    chat = await fitted(chat, served, earlier.tenant)
                await self._answer(run, chat, served, num_bytes, (earlier.response_id, restart.created_at))

        self._runs.resume(run, work)

    async def _answer(
        self,
        run: BackgroundRun,
        chat: ChatBody,
        served: ServedModel,
        num_body_bytes: int,
        begun: tuple[str, int] | None = None,
    ) -> None:
        """Answer in the background. Raises ApiError, ClientGoneError."""
        chat.stream = True
        style = AnswerStyle(self._kept.id_prefix, run.pending.make_format, run.settle, begun=begun, by_token=True)
        await answer_chat(run.exchange, chat, served, style, num_body_bytes=num_body_bytes)

    async def _keep_unanswered(
        self, exchange: Exchange, pending: PendingResponse, served: ServedModel, turn: Turn
    ) -> None:
        """Answer a turn that generates nothing: its items are available to the next turn. Raises ApiError."""
        identity = Identity(
            served.new_id(self._kept.id_prefix),
            int(time.time()),
            pending.model,
            served.card.fingerprint or None,
        )
        answer = pending.make_format(identity, Usage(prompt_tokens=0), StreamUsageOptions())
        events = answer.opening(0) + answer.end_unanswered()
        await self._keep(exchange, pending, turn, events)
        await EventStream(exchange, lambda: ()).end(events)

    async def _keep(self, exchange: Exchange, pending: PendingResponse, turn: Turn | None, _last: bytes) -> None:
        """Store an answer before its client has all of it. If that fails, the client still receives its answer, with
        the reason in a header if that has not been sent."""
        if pending.ended is not None and turn is not None:
            turn.keep(pending.ended)
        if pending.ended is not None and pending.is_stored:
            reason = await self._kept.store.put(exchange.tenant, pending.ended)
            if reason is not None:
                exchange.more_headers = (*exchange.more_headers, (_NOT_STORED_HEADER, reason.encode()))
                self._not_stored.log(f"{pending.ended.response_id} is not stored: {reason}")

    async def count_input(self, exchange: Exchange, context: EndpointContext) -> None:
        """POST /v1/responses/input_tokens. Raises ApiError, ClientGoneError."""
        body, served, num_sent_bytes = await context.receive(
            exchange, decode_responses, model_of=lambda body: body.model
        )
        async with exchange.cancelled_on_disconnect():
            previous = await self._previous(exchange.tenant, body)
            chat, _ = await self._chat(exchange.tenant, body, previous, num_sent_bytes)
            with renamed(RENAMED):
                prompt = await render_chat(chat, served, exchange.tenant, is_long=True)
            answer = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
            await exchange.respond(200, msgspec.json.encode(answer))

    async def compact(self, exchange: Exchange, context: EndpointContext) -> None:
        """POST /v1/responses/compact: let the model summarize a conversation. Nothing is stored.

        Raises ApiError, ClientGoneError.
        """
        body, served, num_sent_bytes = await context.receive_body(exchange, decode_responses)
        if body.model is None:
            raise ApiError(ErrorKind.MISSING_FIELD, "model: required", param="model")
        for field in ("background", "stream", "truncation"):
            if getattr(body, field) not in (None, False, "disabled"):
                invalid(field, "not available for a compaction")
        async with exchange.cancelled_on_disconnect():
            previous = await self._previous(exchange.tenant, body)
            chat, num_body_bytes = await self._chat(exchange.tenant, body, previous, num_sent_bytes)
        user_texts = [text_of(message.content) for message in chat.messages if message.role == "user"]
        chat.messages = [*chat.messages, ChatMessage("user", REQUEST)]
        chat.tools = chat.tool_choice = chat.response_format = None

        def make_format(identity: Identity, usage: Usage, _: StreamUsageOptions) -> CompactionFormat:
            return CompactionFormat(identity, usage, user_texts)

        with renamed(RENAMED):
            await answer_chat(exchange, chat, served, AnswerStyle("resp_", make_format), num_body_bytes=num_body_bytes)

    async def retrieve(self, exchange: Exchange, context: EndpointContext) -> None:
        """GET /v1/responses/ID. Raises ApiError, ClientGoneError."""
        response_id, query = _path_below(exchange), _query(exchange)
        run = self._runs.find(exchange.tenant, response_id)
        if query.get("stream") == "true":
            starting_after = _number(query, "starting_after", -1, 0, (1 << 31) - 1)
            await self._follow(exchange, context, response_id, starting_after)
        elif run is not None:
            await exchange.respond(200, run.snapshot())
        else:
            await exchange.respond(200, (await self._kept.find(exchange.tenant, response_id)).body)

    async def delete(self, exchange: Exchange, _context: EndpointContext) -> None:
        """DELETE /v1/responses/ID. If it still runs it is cancelled: another worker ends it when it finds that it is
        gone.

        Raises ApiError.
        """
        response_id = _path_below(exchange)
        await self._runs.cancel(exchange.tenant, response_id)
        await self._kept.remove(exchange.tenant, response_id)
        self._is_to_scrub.set()
        answer = {"id": response_id, "object": "response", "deleted": True}
        await exchange.respond(200, msgspec.json.encode(answer))

    async def cancel(self, exchange: Exchange, _context: EndpointContext) -> None:
        """POST /v1/responses/ID/cancel. A response that has ended is returned unchanged. Raises ApiError."""
        response_id = _path_below(exchange).removesuffix("/cancel")
        await self._runs.cancel(exchange.tenant, response_id)
        stored = await self._kept.find(exchange.tenant, response_id)
        if not stored.is_background:
            invalid(
                "response_id", "only a response made with background can be cancelled: close the connection instead"
            )
        if stored.is_running:
            stored = await self._cancel_elsewhere(exchange.tenant, response_id)
        await exchange.respond(200, stored.body)

    async def _cancel_elsewhere(self, tenant: bytes, response_id: str) -> StoredResponse:
        """Let the worker that generates the response cancel it. Raises ApiError."""
        await self._kept.store.cancel(tenant, response_id)
        for _ in range(round(_CANCEL_TIMEOUT_S / _CANCEL_LOOKS_EVERY_S)):
            await asyncio.sleep(_CANCEL_LOOKS_EVERY_S)
            stored = await self._kept.find(tenant, response_id)
            if not stored.is_running:
                return stored
        message = (
            f"the worker that generates this response has not ended it within {_CANCEL_TIMEOUT_S:g} s; retry later"
        )
        raise retry_later(ErrorKind.UNAVAILABLE, message, 5)

    async def list_input(self, exchange: Exchange, _context: EndpointContext) -> None:
        """GET /v1/responses/ID/input_items: the request's own items, in pages. Raises ApiError."""
        response_id = _path_below(exchange).removesuffix("/input_items")
        query = _query(exchange)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            invalid("order", f'must be "asc" or "desc", got {shorten(order)}')
        limit = _number(query, "limit", _ITEMS_PER_PAGE, 1, _MAX_ITEMS_PER_PAGE)
        items = await self._kept.input_items(exchange.tenant, response_id)
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

    async def _previous(self, tenant: bytes, body: ResponsesBody, turn: Turn | None = None) -> StoredResponse | None:
        """Return the response that the request continues. Raises ApiError."""
        response_id = body.previous_response_id
        if response_id is None:
            return None
        if turn is not None and (latest := turn.find(response_id)) is not None:
            return latest
        previous = await self._kept.find(tenant, response_id, "previous_response_id")
        if previous.is_running:
            invalid("previous_response_id", "this response has not ended yet")
        return previous

    async def _chat(
        self, tenant: bytes, body: ResponsesBody, previous: StoredResponse | None, num_body_bytes: int
    ) -> tuple[ChatBody, int]:
        """Return the request as a chat, and its size in bytes with everything that it refers to. Raises ApiError."""
        num_bytes = num_body_bytes + (0 if previous is None else len(previous.message_data))
        if isinstance(body.input, list):
            body.input, num_referenced = await self._kept.resolved(tenant, body.input)
            num_bytes += num_referenced
        chat = await run_sized(num_bytes, lambda: as_chat(body, () if previous is None else previous.messages))
        with renamed(RENAMED):
            await run_sized(num_bytes, check_chat, chat)
        return chat, num_bytes

    async def _follow(
        self, exchange: Exchange, context: EndpointContext, response_id: str, starting_after: int
    ) -> None:
        """Send the events of a response that runs, is kept or lingers. Raises ApiError, ClientGoneError."""
        run = self._runs.find(exchange.tenant, response_id)
        keeps_events = run.events is not None if run is not None else None
        if keeps_events is None:
            refusal: ApiError | None = None
            try:
                keeps_events = (await self._kept.find(exchange.tenant, response_id)).keeps_events
            except ApiError as error:
                refusal = error
            if not keeps_events and await self._follow_lingering(exchange, context, response_id, starting_after):
                return
            if refusal is not None:
                raise refusal
        if not keeps_events:
            message = "only a response made with background and stream, or one that lingers, can be streamed again"
            invalid("stream", message)
        await self._followers.follow(exchange, response_id, None if run is None else run.events, starting_after)

    async def _follow_lingering(
        self, exchange: Exchange, context: EndpointContext, response_id: str, starting_after: int
    ) -> bool:
        """Whether the backend has kept the response; if so, send its events. Raises ApiError, ClientGoneError."""
        try:
            await find_stream(exchange, context, response_id, starting_after + 1)
        except ApiError as error:
            if error.kind is ErrorKind.UNKNOWN_STREAM:
                return False
            raise
        await self.create(exchange, context)
        return True


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
