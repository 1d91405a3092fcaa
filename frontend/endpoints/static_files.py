"""Files of web pages. They load nothing from other sites, and no other site may frame them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.docs.endpoint_docs import CSS, HTML, SCRIPT
from penstock.frontend.endpoints.routes import EndpointDoc, Methods, get
from penstock.frontend.transport.asgi import Headers
from penstock.frontend.transport.errors import ApiError, ErrorKind, shorten
from penstock.frontend.transport.exchange import Exchange

# A model's text is shown as HTML, and only the sanitizer may make HTML from text (Trusted Types, W3C).
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    b"manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types dompurify"
)
CHAT_POLICY = _POLICY.replace(b"img-src 'self'", b"img-src 'self' blob:")  # blobs are pictures that the reader attached
_MANUAL_POLICY = (
    b"default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    b"connect-src 'self'; worker-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The generator of the manual writes scripts into its pages."""
_MANIFEST = "application/manifest+json"
_CONTENT_TYPES = {"html": HTML, "css": CSS, "js": SCRIPT, "svg": "image/svg+xml", "webmanifest": _MANIFEST}
_MANUAL_TYPES = _CONTENT_TYPES | {"json": "application/json", "png": "image/png"}


class StaticFiles:
    """The files below a folder of a package, which are known when the process starts."""

    def __init__(
        self, package: str, folder: str, url: str, policy: bytes = _POLICY, types: Mapping[str, str] = _CONTENT_TYPES
    ) -> None:
        """url is the prefix of the files' paths, such as "/docs/". A folder that does not exist has no files."""
        self._url = url
        self._types = types
        self._headers: Headers = (
            (b"content-security-policy", policy),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cache-control", b"no-cache"),
        )
        root = files(package).joinpath(folder)
        self.files = {name: file for name, file in _walk(root, "") if name.rpartition(".")[2] in types}

    async def index(self, exchange: Exchange, _context: EndpointContext) -> None:
        await self._respond(exchange, "index.html")

    async def file(self, exchange: Exchange, _context: EndpointContext) -> None:
        """Raises ApiError: 404."""
        await self._respond(exchange, exchange.path.removeprefix(self._url))

    async def _respond(self, exchange: Exchange, name: str) -> None:
        if name not in self.files:
            raise ApiError(ErrorKind.UNKNOWN_PATH, f"no such path: {shorten(exchange.path)}; /docs lists the endpoints")
        kind = self._types[name.rpartition(".")[2]]
        content_type = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
        await exchange.respond(200, self.files[name].read_bytes(), self._headers, content_type=content_type.encode())


def manual_routes(missing: EndpointDoc) -> dict[str, Methods]:
    """The pages of docs/ below /manual/, where `make docs` has built them; otherwise none."""
    manual = StaticFiles("penstock.frontend.endpoints", "manual", "/manual/", _MANUAL_POLICY, _MANUAL_TYPES)
    pages = {f"/manual/{name}": get(manual.file, missing, needs_key=False) for name in manual.files}
    return pages | ({"/manual/": get(manual.index, missing, needs_key=False)} if pages else {})


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry
