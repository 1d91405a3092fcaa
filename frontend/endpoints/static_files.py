"""Files of web pages. They load nothing from other sites, and no other site may frame them."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from penstock.frontend.endpoints.docs.endpoint_docs import CSS, HTML, SCRIPT
from penstock.frontend.transport.errors import ApiError, ErrorKind, shorten

if TYPE_CHECKING:
    from penstock.frontend.endpoints.context import EndpointContext
    from penstock.frontend.transport.asgi import Headers
    from penstock.frontend.transport.exchange import Exchange

# A model's text is shown as HTML, and only the sanitizer may make HTML from text (Trusted Types, W3C).
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS: Headers = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
_CONTENT_TYPES = {"html": HTML, "css": CSS, "js": SCRIPT}


class StaticFiles:
    """The files below a folder of a package, which are known when the process starts."""

    def __init__(self, package: str, folder: str, url: str) -> None:
        """url is the prefix of the files' paths, such as "/docs/"."""
        self._url = url
        root = files(package).joinpath(folder)
        inner = [(f"{each.name}/", each) for each in root.iterdir() if each.is_dir()]
        self._files = {
            prefix + file.name: file
            for prefix, directory in [("", root), *inner]
            for file in directory.iterdir()
            if file.is_file() and file.name.rpartition(".")[2] in _CONTENT_TYPES
        }

    async def index(self, exchange: Exchange, _context: EndpointContext) -> None:
        await self._respond(exchange, "index.html")

    async def file(self, exchange: Exchange, _context: EndpointContext) -> None:
        """Raises ApiError: 404."""
        await self._respond(exchange, exchange.path.removeprefix(self._url))

    async def _respond(self, exchange: Exchange, name: str) -> None:
        if name not in self._files:
            raise ApiError(ErrorKind.UNKNOWN_PATH, f"no such path: {shorten(exchange.path)}; /docs lists the endpoints")
        content_type = f"{_CONTENT_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        await exchange.respond(200, self._files[name].read_bytes(), _HEADERS, content_type=content_type.encode())
