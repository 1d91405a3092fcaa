"""Sends one request, misbehaves as planned, and records the result."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import Struct

from penstock.tools.bench.load_generator.http_client import (
    ClientConnection,
    ConnectionBroken,
    HttpClient,
    HttpReply,
    HungUp,
)
from penstock.tools.chaos.ledger import Answer, ChoiceAnswer, Ending
from penstock.tools.chaos.plan import Act, Hangup, Recipe, Stage


class _Message(Struct):
    content: str | None = None


class _Choice(Struct):
    index: int = 0
    text: str = ""
    message: _Message | None = None
    delta: _Message | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def new_text(self) -> str:
        said = self.message or self.delta
        return self.text or (said.content or "" if said is not None else "")


class _Usage(Struct):
    """The usage of any endpoint. Anthropic's input tokens exclude cached ones."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class _ErrorObject(Struct):
    message: str = ""
    code: str | None = None
    type: str = ""
    """Anthropic's errors have no code."""


class _Delta(Struct):
    """A piece of text of /v1/messages, or the end of a message."""

    text: str = ""
    stop_reason: str | None = None


class _Part(Struct):
    text: str = ""


class _Item(Struct):
    """A message of /v1/responses."""

    content: list[_Part] = []


class _Pooled(Struct):
    """A vector or a score."""

    index: int
    embedding: str = ""
    relevance_score: float = 0.0


class _Body(Struct):
    """An event, a whole answer or an error: the fields that this client reads."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _ErrorObject | None = None
    # /v1/messages and /v1/responses
    type: str = ""
    delta: _Delta | str | None = None
    content: list[_Part] = []
    stop_reason: str | None = None
    output: list[_Item] = []
    status: str = ""
    response: _Body | None = None
    # /v1/embeddings and /v1/rerank
    data: list[_Pooled] = []
    results: list[_Pooled] = []


_decoder = msgspec.json.Decoder(_Body)


class _Partial:
    """A choice that may be incomplete."""

    __slots__ = ("finish_reason", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.finish_reason = ""


@dataclass(slots=True)
class _Seen:
    """The part of one answer that has arrived."""

    choices: dict[int, _Partial] = field(default_factory=dict)
    usage: _Usage | None = None
    fault: str = ""
    code: str = ""
    """The code of an error event."""
    num_events: int = 0
    is_done: bool = False

    def take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            body = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            self.fault = self.fault or f"not an answer: {error}"
            return
        told = body.error or (body.response.error if body.response is not None else None)
        if told is not None:
            self.code = self.code or told.code or told.type
            self.fault = self.fault or f"error event {self.code}: {told.message[:200]}"
        self.usage = body.usage or self.usage
        self.num_events += 1
        if body.type or body.output:
            self._take_single(body)
        for pooled in (*body.data, *body.results):
            partial = self.choices.setdefault(pooled.index, _Partial())
            partial.texts.append(pooled.embedding or str(pooled.relevance_score))
        for choice in body.choices:
            partial = self.choices.setdefault(choice.index, _Partial())
            partial.texts.append(choice.new_text())
            partial.token_ids += choice.token_ids or ()
            if choice.finish_reason is not None:
                partial.finish_reason = choice.finish_reason

    def _take_single(self, body: _Body) -> None:
        """Add an event of /v1/messages or /v1/responses: its one choice."""
        partial = self.choices.setdefault(0, _Partial())
        match body.type, body.delta:
            case "response.output_text.delta", str(piece):
                partial.texts.append(piece)
            case (("content_block_delta" | "message_delta"), _Delta() as delta):
                partial.texts.append(delta.text)
                partial.finish_reason = delta.stop_reason or ""
            case (("response.completed" | "response.incomplete"), _) if body.response is not None:
                self.usage = body.response.usage
                partial.finish_reason = body.response.status
                self.is_done = True
            case "message_stop", _:
                self.is_done = True
            case ("message", _) | ("", _):
                items = [*body.content, *(part for item in body.output for part in item.content)]
                partial.texts += [part.text for part in items]
                partial.finish_reason = body.stop_reason or body.status

    def answer(self, recipe: Recipe) -> Answer:
        """The answer so far. Choices without any content are empty."""
        partials = [self.choices.get(index) or _Partial() for index in range(recipe.choices)]
        usage = self.usage or _Usage()
        return Answer(
            tuple(ChoiceAnswer("".join(each.texts), tuple(each.token_ids), each.finish_reason) for each in partials),
            usage.prompt_tokens + usage.input_tokens + usage.cache_read_input_tokens,
            usage.completion_tokens + usage.output_tokens,
            recipe.has_token_ids,
        )


@dataclass(slots=True)
class ChaosClient:
    """Clients of all tenants at one entrance, which share its connections."""

    http: HttpClient

    async def ask(self, recipe: Recipe, api_key: str | None = None, *, is_stream: bool = False) -> Answer:
        """The whole answer of an undisturbed request, or its refusal. Raises ConnectionBroken; ValueError for a broken
        answer."""
        seen = _Seen()
        connection = await self.http.connect()
        request = self._encode(recipe, api_key, is_stream=is_stream)
        reply = await connection.exchange(request, lambda _at_s, data: seen.take(data))
        self.http.give_back(connection)
        if reply.status != 200 and (code := _error_code(reply.body)):
            return Answer((), refusal=(reply.status, code))
        if reply.status != 200:
            raise ValueError(f"{recipe.name}: status {reply.status}: {reply.body[:300].decode(errors='replace')}")
        if not (is_stream and recipe.can_stream):
            seen.take(reply.body)
        if seen.code:
            return Answer((), refusal=(reply.status, seen.code))
        if seen.fault:
            raise ValueError(f"{recipe.name}: {seen.fault}")
        return seen.answer(recipe)

    def _encode(self, recipe: Recipe, api_key: str | None, *, is_stream: bool, may_join: bool = True) -> bytes:
        body = recipe.body | ({"stream": True} if is_stream and recipe.can_stream else {})
        if is_stream and recipe.has_token_ids:  # the others always report the usage
            body["stream_options"] = {"include_usage": True}
        headers = {} if may_join else {"X-Penstock-Coalesce": "off"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        return self.http.encode_post(recipe.path, msgspec.json.encode(body), headers)

    async def perform(self, act: Act) -> Ending:
        """Send one request as planned, until its end or ours. Faults of the server are in the ending."""
        recipe = act.recipe
        if act.cache_salt is not None:
            recipe = replace(recipe, body=recipe.body | {"cache_salt": act.cache_salt})
        request = self._encode(recipe, act.tenant.api_key, is_stream=act.is_stream, may_join=act.may_join)
        started_s = time.monotonic()
        seen, reply, is_dropped, is_broken = _Seen(), HttpReply(), False, False
        connection = None
        try:
            connection = await self.http.connect()
            if act.hangup is not None and act.hangup.stage in _PARTS:
                await _send_part(connection, request, act.hangup)
                is_dropped = True
            else:
                reply = await _exchange(connection, request, act, seen)
                self.http.give_back(connection)
        except HungUp:
            is_dropped = True
        except ConnectionBroken as error:
            # No worker had a connection that was never made.
            is_broken, seen.fault = connection is not None, seen.fault or str(error)
        code = seen.code
        if reply.status == 200 and not seen.num_events and not is_dropped:
            seen.take(reply.body)
        elif reply.status not in (0, 200):
            code = _error_code(reply.body)
            if not code:  # a proxy speaks: no answer of ours is without a code
                is_broken, seen.fault = reply.status == _BAD_GATEWAY, f"status {reply.status}: {reply.body[:100]!r}"
        if act.is_stream and reply.status == 200 and not seen.is_done:
            seen.fault = seen.fault or "the stream ended without [DONE]"
        return Ending(
            index=act.index,
            started_s=started_s,
            ended_s=time.monotonic(),
            is_dropped=is_dropped,
            answer=seen.answer(recipe) if reply.status in (0, 200) else None,
            status=reply.status,
            code=code,
            has_retry_after=reply.headers.get("retry-after", "").isdecimal(),
            fault="" if is_dropped else seen.fault,
            is_broken=is_broken,
        )


_BAD_GATEWAY = 502
"""The connection to the server broke. With 503 and 504 a proxy reports no connection, or no answer in time."""
_PARTS = (Stage.CONNECTED, Stage.IN_HEAD, Stage.IN_BODY)


async def _send_part(connection: ClientConnection, request: bytes, hangup: Hangup) -> None:
    """Send a part of a request, wait, and hang up."""
    head_bytes = request.index(b"\r\n\r\n") + 4
    end = {Stage.CONNECTED: 0, Stage.IN_HEAD: head_bytes // 2}.get(hangup.stage, (head_bytes + len(request)) // 2)
    connection.send(request[:end])
    await asyncio.sleep(hangup.delay_s)
    connection.close()


async def _exchange(connection: ClientConnection, request: bytes, act: Act, seen: _Seen) -> HttpReply:
    """Raises HungUp, ConnectionBroken."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def hang_up_if_due() -> None:
        """Hang up after the delay, or at the next event if that comes first."""
        nonlocal timer
        if act.hangup is None or seen.num_events < act.hangup.after_events:
            return
        if timer is None:
            timer = loop.call_later(act.hangup.delay_s, connection.hang_up)
        else:
            connection.hang_up()

    def on_event(_at_s: float, data: bytes) -> None:
        seen.take(data)
        if seen.num_events == 1 and act.pause_s:
            connection.pause_reading(act.pause_s)
        if not seen.is_done:
            hang_up_if_due()

    hang_up_if_due()
    try:
        return await connection.exchange(request, on_event)
    except asyncio.CancelledError:
        connection.close()
        raise
    finally:
        if timer is not None:
            timer.cancel()


def _error_code(body: bytes) -> str:
    """Return the code of an error object, or Anthropic's type; empty if the body is not an error."""
    try:
        error = _decoder.decode(body).error
    except msgspec.MsgspecError:
        return ""
    return (error.code or error.type) if error is not None else ""
