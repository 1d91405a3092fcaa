"""CORS: which web pages of other origins may read answers. Credentials are never allowed, because keys are headers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.frontend.transport.asgi import Headers
from penstock.frontend.transport.errors import ApiError, ErrorKind, shorten
from penstock.frontend.transport.exchange import Exchange

_MAX_AGE_S = 600
_REQUESTED_HEADERS = re.compile(rb"[A-Za-z0-9_, -]{1,2048}")
_EXPOSED = (
    b"x-request-id, retry-after, server-timing, x-penstock-coalesced, x-penstock-ignored, "
    b"x-penstock-stream, x-penstock-request, x-penstock-not-stored, x-penstock-tools, "
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

    def refuse_foreign(self, exchange: Exchange, action: str) -> None:
        """Refuse a request that a browser sends for a page of an origin that is not allowed.

        Other clients pass. action completes "may not … here". Raises ApiError.
        """
        if self._all or self._allows(exchange):
            return
        origin = exchange.header(b"origin")
        is_other_origin = origin is not None and origin.partition(b"://")[2] != exchange.header(b"host")
        if is_other_origin or exchange.header(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            shown = "another site" if origin is None else shorten(origin.decode("latin-1"))
            message = f"origin: a page of {shown} may not {action} here; allow it with --cors-allow-origin"
            raise ApiError(ErrorKind.FOREIGN_ORIGIN, message, param="origin")

    def _allows(self, exchange: Exchange) -> bool:
        origin = exchange.header(b"origin")
        return origin is not None and (self._all or origin in self._origins)
