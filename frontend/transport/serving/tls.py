"""TLS by certificate files."""

from __future__ import annotations

import ssl

from msgspec import Struct

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
