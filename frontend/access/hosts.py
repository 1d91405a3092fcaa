"""Host names that a server without keys accepts when it listens on a loopback address.

A web page from anywhere can point its own host name to 127.0.0.1 (DNS rebinding). To the browser our answers are then
of the same origin as the page, so CORS does not protect them. The Host header shows the foreign name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import TYPE_CHECKING

from penstock.frontend.transport.errors import ApiError, ErrorKind, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.frontend.transport.exchange import Exchange

_PRIVATE = (".localhost", ".local", ".internal")
"""No public zone has names under these: RFC 6761, RFC 6762, and ICANN's reservation of .internal (2024)."""
_PORT = re.compile(r":\d{0,5}\Z")


class AllowedHosts:
    """Refuses names that a stranger can register: with a dot, and not among the given ones."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """names are accepted in addition to private ones; "*" accepts all."""
        self._names = frozenset(name.lower() for name in names)

    def check(self, exchange: Exchange) -> None:
        """Raises ApiError."""
        host = exchange.header(b"host")
        if host is None:  # browsers always send it
            return
        name = _PORT.sub("", host.decode("latin-1")).rstrip(".").lower()
        if not (name in self._names or "*" in self._names or _is_private(name)):
            raise ApiError(
                ErrorKind.FOREIGN_HOST,
                f"host: {shorten(name)} is not a name of this server; start it with keys or --allowed-host",
                param="host",
            )


def _is_private(name: str) -> bool:
    """Whether the name is an IP address, or resolved only by this machine or its network."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return "." not in name or name.endswith(_PRIVATE)
    return True


def serves_one_machine(listening: socket.socket) -> bool:
    """Whether the socket listens on a loopback address. Only programs of this machine, browsers included, reach it."""
    if listening.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback
