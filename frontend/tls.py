"""TLS by certificate files."""

from __future__ import annotations

import ssl

from msgspec import Struct

HANDSHAKE_TIMEOUT_S = 10.0
_MAX_FILE_BYTES = 1 << 20


class TlsError(ValueError):
    """Why the files cannot be used, in one line."""


class TlsFiles(Struct, frozen=True):
    """PEM files: a certificate, with its chain behind it, and its private key, which may be in the same file."""

    certfile: str
    keyfile: str | None = None
    password: str | None = None
    """Of an encrypted key."""


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS 1.2 and later, HTTP/1.1. Raises TlsError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    load(context, files)
    return context


def load(context: ssl.SSLContext, files: TlsFiles) -> None:
    """For connections from now on. Raises TlsError; the context goes on with what it had."""
    for path in (files.certfile, files.keyfile):
        if path is not None:
            _check_readable(path)
    try:
        # Without a function OpenSSL would ask the terminal.
        context.load_cert_chain(files.certfile, files.keyfile, password=lambda: files.password or "")
    except ssl.SSLError as error:
        raise TlsError(_explain(error, files)) from None
    except OSError as error:
        raise TlsError(f"{files.certfile}: {error.strerror}") from None


def _check_readable(path: str) -> None:
    try:
        with open(path, "rb"):
            return
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror}") from None


def _explain(error: ssl.SSLError, files: TlsFiles) -> str:
    keyfile = files.keyfile or files.certfile
    if "MISMATCH" in (error.reason or ""):
        return f"the key in {keyfile} is not the one of the certificate in {files.certfile}"
    with open(keyfile, "rb") as file:
        is_encrypted = b"ENCRYPTED" in file.read(_MAX_FILE_BYTES)
    if is_encrypted:
        remedy = "the password is wrong" if files.password else "set PENSTOCK_SSL_KEYFILE_PASSWORD"
        return f"the key in {keyfile} is encrypted: {remedy}"
    return f"{files.certfile} and {keyfile} do not hold a certificate and its key in PEM"
