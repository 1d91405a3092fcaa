"""By which names a server may be called that asks for no key and serves this machine alone.

A page from anywhere may let its own name point to 127.0.0.1 (DNS rebinding): to the browser our answers are then that
page's own, and no rule about origins keeps them from it. What gives it away is the Host header.
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
"""Names under these are in nobody's public zone: RFC 6761, RFC 6762, and ICANN's reservation of .internal (2024)."""
_PORT = re.compile(r":\d{0,5}\Z")


class Hosts:
    """Names that are refused are such as a stranger can register: with a dot, and not said to be ours."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """names besides; "*" among them is all."""
        self._names = frozenset(name.lower() for name in names)

    def check(self, exchange: Exchange) -> None:
        """Raises ApiError."""
        host = exchange.header(b"host")
        if host is None:  # no browser leaves it out
            return
        name = _PORT.sub("", host.decode("latin-1")).rstrip(".").lower()
        if not (name in self._names or "*" in self._names or _is_private(name)):
            raise ApiError(
                ErrorKind.FOREIGN_HOST,
                f"host: {shorten(name)} is no name of this server, which has no key; --allowed-host allows it",
                param="host",
            )


def _is_private(name: str) -> bool:
    """Whether the name is an address, or one that only this machine or its network gives a meaning."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return "." not in name or name.endswith(_PRIVATE)
    return True


def serves_one_machine(listening: socket.socket) -> bool:
    """Whether it listens on a loopback address: what only this machine's programs reach, its browsers among them."""
    if listening.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback
