"""GET /openapi.json, the document; and GET /docs, a page that shows it and loads nothing from other sites."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.endpoints.docs.endpoint_docs import CSS, HTML, SCRIPT
from penstock.frontend.endpoints.docs.openapi import document

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.frontend.endpoints.context import EndpointContext
    from penstock.frontend.endpoints.routes import Route
    from penstock.frontend.transport.asgi import Headers
    from penstock.frontend.transport.exchange import Exchange

_PAGE_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS: Headers = (
    (b"content-security-policy", _PAGE_POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


class DocumentationPages:
    """Serves the document and its page. Both stay the same while the process runs."""

    def __init__(self, routes: Mapping[str, Mapping[str, Route]], version: str) -> None:
        self._routes = routes
        self._version = version
        self._document: bytes | None = None

    async def document(self, exchange: Exchange, _context: EndpointContext) -> None:
        if self._document is None:
            self._document = msgspec.json.encode(document(self._routes, self._version))
        await exchange.respond(200, self._document)

    async def page(self, exchange: Exchange, _context: EndpointContext) -> None:
        await _respond(exchange, "index.html", HTML)

    async def script(self, exchange: Exchange, _context: EndpointContext) -> None:
        await _respond(exchange, "page.js", SCRIPT)

    async def style(self, exchange: Exchange, _context: EndpointContext) -> None:
        await _respond(exchange, "page.css", CSS)


async def _respond(exchange: Exchange, name: str, content_type: str) -> None:
    data = files(__package__).joinpath("page", name).read_bytes()
    await exchange.respond(200, data, _PAGE_HEADERS, content_type=f"{content_type}; charset=utf-8".encode())
