"""Queries our own server over its listening socket, of any kind."""

from __future__ import annotations

import http.client
import socket
import ssl

_PROBE_TIMEOUT_S = 0.5
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - compared, not listened on


class _Probe(http.client.HTTPConnection):
    """A connection to our own listening socket, TCP or Unix. It does not check the certificate, which is ours."""

    def __init__(self, listening: socket.socket, *, tls: bool) -> None:
        super().__init__("localhost", timeout=_PROBE_TIMEOUT_S)
        self._family, self._address = listening.family, listening.getsockname()
        self._tls = tls

    def connect(self) -> None:
        self.sock = socket.socket(self._family)
        self.sock.settimeout(_PROBE_TIMEOUT_S)
        address = self._address
        if self._family != socket.AF_UNIX:
            address = (_LOOPBACK_OF.get(address[0], address[0]), *address[1:])
        self.sock.connect(address)
        if self._tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self.sock = context.wrap_socket(self.sock)


def get(listening: socket.socket, path: str, *, tls: bool, key: str | None = None) -> bytes | None:
    """Return our own server's answer; None for any status except 200."""
    connection = _Probe(listening, tls=tls)
    try:
        connection.request("GET", path, headers={} if key is None else {"X-API-Key": key})
        response = connection.getresponse()
        return response.read() if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
