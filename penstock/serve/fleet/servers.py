"""A server of the fleet, as the router and Prometheus see it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_SERVERS = 1024


@dataclass(frozen=True, slots=True, order=True)
class Server:
    number: int
    """Number of the replica, from 0. It stays when the replica moves to another node, and so does the ring."""
    host: str
    """An IP address."""
    port: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < MAX_SERVERS:
            raise ValueError(f"a server has the number {self.number}; the limit is {MAX_SERVERS - 1}")
        if not 1 <= self.port <= 65_535:
            raise ValueError(f"a server has the port {self.port}; it must be from 1 to 65535")
        if "%" in self.host:  # any text may follow it, and the address goes into configurations as it is
            raise ValueError(f"a server has the address {self.host!r}; one with a zone cannot be routed to")
        ipaddress.ip_address(self.host)

    @property
    def name(self) -> str:
        """The number in the ids of the server's answers."""
        return f"s{self.number:04x}"

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def as_targets(servers: Iterable[Server]) -> bytes:
    """Return the list in the format of Prometheus' file_sd_config."""
    found = [{"targets": [server.address], "labels": {"penstock_server": server.name}} for server in sorted(servers)]
    return msgspec.json.format(msgspec.json.encode(found)) + b"\n"
