"""Shared state of one worker's endpoints, and how they receive a request's body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.frontend.schemas.unknown_fields import check_unknown_fields
from penstock.frontend.transport.errors import ApiError, ErrorKind, retry_later, shorten, shutting_down

if TYPE_CHECKING:
    from msgspec import Struct

    from penstock.frontend.access.admission import Admission
    from penstock.frontend.generation.served_model import ModelKeeper, ServedModel
    from penstock.frontend.settings import WorkerLimits
    from penstock.frontend.transport.exchange import Exchange
    from penstock.frontend.transport.open_exchanges import OpenExchanges
    from penstock.shm.client import BackendClient

_BODY_TIMEOUT_S = 30.0
_MODEL_TIMEOUT_S = 2.0
"""How long a request waits for a model that is about to be loaded."""
_JSON_TYPES = (b"application/json", b"text/json")


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """Handed to every endpoint with its request."""

    backend: BackendClient
    models: ModelKeeper
    admission: Admission
    limits: WorkerLimits
    exchanges: OpenExchanges

    async def receive(self, exchange: Exchange, body_type: type[Struct] | None = None) -> tuple[bytes, ServedModel]:
        """Admit the request; return its body and the model. With a body_type, look for fields that it does not have.

        Checks that need no body come before the body is read. Raises ApiError, ClientGoneError.
        """
        self._check_capacity()
        _check_content_type(exchange)
        self.admission.admit(exchange)
        data = await exchange.read_body(max_bytes=self.limits.max_body_bytes, timeout_s=_BODY_TIMEOUT_S)
        if body_type is not None:
            check_unknown_fields(data, body_type, exchange.request_id, refuses=self.limits.refuses_unknown_fields)
        return data, await self.model_soon(exchange)

    def _check_capacity(self) -> None:
        if self.exchanges.is_draining:
            raise shutting_down()
        if len(self.exchanges) > self.limits.max_open_requests:
            message = (
                f"too many open requests: the limit of this worker is {self.limits.max_open_requests}; retry later"
            )
            raise retry_later(ErrorKind.OVERLOADED, message, 1)
        if self.models.settled.is_set():
            self.model_now()

    async def model_soon(self, exchange: Exchange) -> ServedModel:
        """Return the model; wait for one that is about to be loaded, as in a worker that has just started."""
        if self.models.current is None:
            await exchange.wait_for(self.models.settled, _MODEL_TIMEOUT_S)
        return self.model_now()

    def model_now(self) -> ServedModel:
        """Return the model. Raises ApiError when none is loaded."""
        served = self.models.current
        if served is None:
            raise retry_later(ErrorKind.UNAVAILABLE, "the model is still loading; retry later", 2)
        return served


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
