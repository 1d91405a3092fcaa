"""POST /admin/requests/FRONTEND.REQUEST/cancel: the operator ends a request of any client."""

from __future__ import annotations

import logging
import re

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.generation.failures import backend_unavailable
from penstock.frontend.generation.questions import ask
from penstock.frontend.transport.errors import ApiError, ErrorKind, shorten
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.client import RequestName, backends_of

logger = logging.getLogger("penstock.admin")

_PATH = re.compile(r"/admin/requests/(\d{1,19})\.(\d{1,19})/cancel")
_MAX_NUMBER = (1 << 63) - 1


async def cancel_request(exchange: Exchange, context: EndpointContext) -> None:
    """Needs the admin key. Raises ApiError."""
    context.admission.check_admin(exchange)
    target = _target(exchange.path)
    backends = [backend for keeper in context.models.keepers for _, backend in backends_of(keeper.backend)]
    for backend in backends:
        if backend.ready and await ask(backend, target) is not None:
            logger.warning("the operator cancelled request %d of frontend %d", target.request_id, target.frontend)
            await exchange.respond(200, b'{"object":"request.cancelled"}')
            return
    if not any(backend.ready for backend in backends):
        raise backend_unavailable(backends[0].retry_after_s)
    name = f"{target.frontend}.{target.request_id}"
    raise ApiError(ErrorKind.UNKNOWN_REQUEST, f"request {name} is not open: it has ended, or never was")


def _target(path: str) -> RequestName:
    """Raises ApiError."""
    match = _PATH.fullmatch(path)
    if match is None or max(frontend := int(match[1]), request_id := int(match[2])) > _MAX_NUMBER:
        message = f"{shorten(path)}: a request is named FRONTEND.REQUEST, two numbers from 0 to {_MAX_NUMBER}"
        raise ApiError(ErrorKind.INVALID_VALUE, message, param="request")
    return RequestName(frontend, request_id)
