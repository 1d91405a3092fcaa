"""GET /openapi.json, the document that the page at /docs shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.endpoints.docs.openapi import document

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.frontend.endpoints.context import EndpointContext
    from penstock.frontend.endpoints.routes import Route
    from penstock.frontend.transport.exchange import Exchange


class Documentation:
    """Serves the document. It stays the same while the process runs."""

    def __init__(self, routes: Mapping[str, Mapping[str, Route]], version: str) -> None:
        self._routes = routes
        self._version = version
        self._document: bytes | None = None

    async def document(self, exchange: Exchange, _context: EndpointContext) -> None:
        if self._document is None:
            self._document = msgspec.json.encode(document(self._routes, self._version))
        await exchange.respond(200, self._document)
