"""CORS: which web pages of other origins may read answers. Credentials are never allowed, because keys are headers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.frontend.transport.errors import ApiError, ErrorKind, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.frontend.transport.asgi import Headers
    from penstock.frontend.transport.exchange import Exchange

_MAX_AGE_S = 600
_REQUESTED_HEADERS = re.compile(rb"[A-Za-z0-9_, -]{1,2048}")
_EXPOSED = (
    b"x-request-id, retry-after, server-timing, x-penstock-coalesced, x-penstock-ignored, "
    b"x-ratelimit-limit-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, "
    b"x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)


class Cors:
    """The allowed origins; without any, no answer carries CORS headers."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        self._all = b"*" in self._origins

    def headers(self, exchange: Exchange) -> Headers:
        """Return the headers that every answer to this request carries."""
        if not self._origins:
            return ()
        if self._all:
            return ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED))
        vary = (b"vary", b"origin")
        if not self._allows(exchange):
            return (vary,)
        origin = exchange.header(b"origin") or b""
        return ((b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED), vary)

    def preflight(self, exchange: Exchange, methods: Iterable[str]) -> Headers | None:
        """Return the headers that answer a preflight request; None for any other request."""
        is_preflight = exchange.method == "OPTIONS" and exchange.header(b"access-control-request-method") is not None
        if not is_preflight or not self._allows(exchange):
            return None
        allowed = [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-max-age", b"%d" % _MAX_AGE_S),
        ]
        requested = exchange.header(b"access-control-request-headers")
        if requested is not None and _REQUESTED_HEADERS.fullmatch(requested):
            # Clients add headers of their own to every request. Allowing them is harmless: unknown ones are ignored.
            allowed.append((b"access-control-allow-headers", requested))
        return allowed

    def check_web_socket(self, exchange: Exchange) -> None:
        """Refuse a page of another origin: a browser asks nobody before it opens a WebSocket. Raises ApiError."""
        origin = exchange.header(b"origin")
        if origin is None or self._allows(exchange) or origin.partition(b"://")[2] == exchange.header(b"host"):
            return
        shown = shorten(origin.decode("latin-1"))
        message = f"origin: a page of {shown} may not open a WebSocket here; allow it with --cors-allow-origin"
        raise ApiError(ErrorKind.FOREIGN_ORIGIN, message, param="origin")

    def _allows(self, exchange: Exchange) -> bool:
        origin = exchange.header(b"origin")
        return origin is not None and (self._all or origin in self._origins)
