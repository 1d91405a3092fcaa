"""TLS by certificate files, and connections before they speak HTTP.

A client that never ends its handshake counts as one connection.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]

from penstock.frontend.transport.incomplete import client_network
from penstock.frontend.transport.serving.http_limits import LimitedProtocol

if TYPE_CHECKING:
    from penstock.frontend.transport.errors import ApiError
    from penstock.frontend.transport.serving.connections import Connections


class TlsHandshake(SSLProtocol):  # type: ignore[misc]
    """One connection, counted from the start of its handshake.

    uvloop's own servers use such a protocol too, but report a connection only after its handshake.
    """

    def __init__(self, connections: Connections, context: ssl.SSLContext, **uvicorn_args: Any) -> None:
        self._connections = connections
        self._loop_time = asyncio.get_running_loop().time
        over_tls = _HttpOverTls(connections, self, **uvicorn_args)
        super().__init__(
            asyncio.get_running_loop(),
            over_tls,
            context,
            None,
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
        )

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._below = transport
        super().connection_made(transport)
        address = client_network(transport.get_extra_info("peername"))
        if not self._connections.add(self, address, self._loop_time()):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connections.remove(self)

    @property
    def num_unsent_bytes(self) -> int:
        """Encrypted bytes that are waiting to be sent."""
        return 0 if self._below.is_closing() else self._below.get_write_buffer_size()

    def close_for_another(self) -> None:
        """Called when the handshake takes long and a new connection needs its place."""
        self._below.abort()


class _HttpOverTls(LimitedProtocol):
    """HTTP on a connection whose handshake is done.

    TLS waits for the client to confirm a close, but a client with an idle connection does not answer. So the wait is
    cut short: it would keep the connection counted, and the server from stopping.
    """

    def __init__(self, connections: Connections, handshake: TlsHandshake, **uvicorn_args: Any) -> None:
        super().__init__(connections, **uvicorn_args)
        self._handshake = handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connections.remove(self._handshake)
        super().connection_made(transport)

    def close_for_another(self) -> None:
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_if_closing()

    def shutdown(self) -> None:
        super().shutdown()
        self._end_if_closing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._end_if_closing()

    def _refuse(self, error: ApiError) -> None:
        super()._refuse(error)
        self._end_if_closing()

    def _end_if_closing(self) -> None:
        if self.transport.is_closing():
            self.loop.call_later(SHUTDOWN_TIMEOUT_S, self._end)

    def _end(self) -> None:
        """Abort the connection unless the client is still reading its answer."""
        if self.transport.get_write_buffer_size() or self._handshake.num_unsent_bytes:
            self._end_if_closing()
        else:
            self.transport.abort()


HANDSHAKE_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 1.0
"""How long a client may take to confirm that the connection ends. Clients with idle connections do not answer."""
_MAX_FILE_BYTES = 1 << 20
_MAX_PASSWORD_BYTES = 1024


class TlsError(ValueError):
    """Says in one line why the files cannot be used."""


class TlsFiles(Struct, frozen=True):
    """PEM files: a certificate followed by its chain, and its private key, which may be in the same file."""

    certfile: str
    keyfile: str | None = None
    password: str | None = None
    """Password of an encrypted key."""


class ServerTls:
    """TLS 1.2 and later, for HTTP/1.1. The certificate can be replaced while the server runs."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises TlsError."""
        self._files = files
        self._newest = self.context = _read(files)
        """Wraps the sockets for the lifetime of the server."""
        self.context.sni_callback = self._give_newest

    def reload(self) -> None:
        """Read the files again, for new connections. Raises TlsError, and then the old certificate stays.

        Each reload makes a new context. A context with half of a new pair is unusable, and one that had a key of
        another type would keep using it.
        """
        self._newest = _read(self._files)

    def _give_newest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called by OpenSSL in each handshake, whether or not the client names a server."""
        connection.context = self._newest


def _read(files: TlsFiles) -> ssl.SSLContext:
    """Raises TlsError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    _check_readable(files.certfile, "certificate")
    if files.keyfile is not None:
        _check_readable(files.keyfile, "private key")
    password = (files.password or "").encode()
    if len(password) > _MAX_PASSWORD_BYTES:
        raise TlsError(f"the password of the key has {len(password)} bytes; the limit is {_MAX_PASSWORD_BYTES}")
    try:
        # Without a function OpenSSL would prompt on the terminal.
        context.load_cert_chain(files.certfile, files.keyfile, password=lambda: password)
    except ssl.SSLError as error:
        raise TlsError(_explain(error, files)) from None
    except OSError as error:
        raise TlsError(f"{files.certfile}: {error.strerror}") from None
    return context


def _check_readable(path: str, purpose: str) -> None:
    try:
        with open(path, "rb"):
            return
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror}; give a file in PEM with the {purpose}") from None


def _explain(error: ssl.SSLError, files: TlsFiles) -> str:
    keyfile = files.keyfile or files.certfile
    if "MISMATCH" in (error.reason or ""):
        return f"the key in {keyfile} does not belong to the certificate in {files.certfile}"
    with open(keyfile, "rb") as file:
        is_encrypted = b"ENCRYPTED" in file.read(_MAX_FILE_BYTES)
    if is_encrypted:
        remedy = "the password is wrong" if files.password else "set PENSTOCK_SSL_KEYFILE_PASSWORD"
        return f"the key in {keyfile} is encrypted: {remedy}"
    return f"{files.certfile} and {keyfile} do not contain a certificate and its key in PEM"
