"""Runs responses again whose worker ended: which parts of a request are kept, and which worker takes it over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw, Struct

from penstock.frontend.endpoints.context import EndpointContext, run_sized
from penstock.frontend.endpoints.responses.background_places import BackgroundClaim, BackgroundPlaces
from penstock.frontend.endpoints.responses.storage.orphans import Orphan, TakenOver
from penstock.frontend.endpoints.responses.storage.store import ResponseStore
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.request_policy import POLICY_HEADERS
from penstock.frontend.schemas.responses import ResponsesBody
from penstock.frontend.transport.asgi import AsgiMessage
from penstock.frontend.transport.errors import ApiError
from penstock.frontend.transport.exchange import Exchange

RunAgain = Callable[["Restart", BackgroundClaim, ServedModel], None]
"""Starts the run of a response that has its place."""

logger = logging.getLogger("penstock.responses")

_LOOKS_EVERY_S = 1.0
_FAILED = "the worker that generated this response died, and it cannot be run again. Send the request again"


class KeptRequest(Struct):
    """A request without its input, which is stored with the response, and without its API key."""

    body: Raw
    received_at: float
    """Seconds since 1970."""
    request_id: str
    payer: bytes
    weight: float
    key_name: str | None
    headers: dict[str, str]

    def client(self, tenant: bytes) -> Exchange:
        """Return an exchange like the client's, but without a body to read."""
        headers = [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
        exchange = Exchange({"type": "http", "method": "POST", "path": _PATH, "headers": headers}, _receive, _send)
        exchange.tenant, exchange.payer, exchange.weight = tenant, self.payer, self.weight
        exchange.key_name, exchange.request_id = self.key_name, self.request_id
        # The time limit keeps running while no worker has the request.
        exchange.received_s = time.monotonic() - max(0.0, time.time() - self.received_at)
        return exchange


class _Created(Struct):
    """The part of a response object that a repeated run must keep."""

    created_at: int


@dataclass(frozen=True, slots=True)
class Restart:
    """A response that was taken over, decoded."""

    earlier: TakenOver
    request: KeptRequest
    body: ResponsesBody
    created_at: int

    @classmethod
    def read(cls, earlier: TakenOver) -> Restart:
        """Raises msgspec.MsgspecError. The body was checked before it was kept."""
        request = _request_decoder.decode(earlier.request)
        created = _created_decoder.decode(earlier.body)
        return cls(earlier, request, _body_decoder.decode(request.body), created.created_at)


_PATH = "/v1/responses"
_request_decoder = msgspec.json.Decoder(KeptRequest)
_body_decoder = msgspec.json.Decoder(ResponsesBody)
_created_decoder = msgspec.json.Decoder(_Created)


def encode_request(body: ResponsesBody, client: Exchange) -> bytes:
    headers = {name.decode(): value.decode("latin-1") for name in POLICY_HEADERS if (value := client.header(name))}
    fields = _given(body)
    fields.pop("input", None)
    return msgspec.json.encode(
        KeptRequest(
            Raw(msgspec.json.encode(fields)),
            time.time() - (time.monotonic() - client.received_s),
            client.request_id,
            client.payer,
            client.weight,
            client.key_name,
            headers,
        )
    )


def _given(struct: Struct) -> dict[str, Any]:
    """Return the fields that have a value.

    Raw fields belong to parameters that are not supported, and ask for nothing.
    """
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        if value is not None and not isinstance(value, Raw):
            found[field.encode_name] = _given(value) if isinstance(value, Struct) else value
    return found


async def _receive() -> AsgiMessage:
    raise RuntimeError("this client has sent all")


async def _send(_: AsgiMessage) -> None:
    raise RuntimeError("this client reads nothing")


class Takeovers:
    """Looks for responses whose worker has ended, and runs again as many as this worker has room for."""

    def __init__(self, store: ResponseStore, places: BackgroundPlaces, run_again: RunAgain) -> None:
        self._store = store
        self._places = places
        self._run_again = run_again

    async def run(self, context: EndpointContext) -> None:
        """Look again and again until cancelled."""
        while self._store.is_shared:
            with contextlib.suppress(ApiError):  # the database has logged it; the next turn tries again
                await self.look(context)
            await asyncio.sleep(_LOOKS_EVERY_S)

    async def look(self, context: EndpointContext) -> None:
        """Take over as many responses as this worker has room for, and end those that cannot run again. Raises
        ApiError."""
        for orphan in await self._store.orphans():
            served = context.models.generation.current
            if orphan.claim is None:
                await self._store.take_over(orphan)
            elif served is not None and not context.exchanges.is_draining:
                await self._take_over(orphan, orphan.claim, served)

    async def _take_over(self, orphan: Orphan, claim: BackgroundClaim, served: ServedModel) -> None:
        try:
            self._places.take(claim)
        except ApiError:  # it waits for a place here or in another worker
            return
        has_begun = False
        try:
            if (found := await self._store.take_over(orphan)) is not None:
                restart = await run_sized(len(found.request) + len(found.body), Restart.read, found)
                self._run_again(restart, claim, served)
                has_begun = True
                why = "it was put back" if orphan.was_put_back else "its worker died"
                logger.warning("runs %s again: %s", orphan.response_id, why)
        except ApiError:
            raise
        except Exception:  # a damaged record, or a bug of ours: it ends this response, and no other
            logger.exception("%s cannot be run again", orphan.response_id)
            await self._store.break_off(orphan.tenant, orphan.response_id, _FAILED)
        finally:
            if not has_begun:
                self._places.release(claim)
