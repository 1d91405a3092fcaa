"""The keeper's interface to a cluster: nodes, and the server that it places on each."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Protocol

import msgspec

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


class Phase(StrEnum):
    """Phase of the serving process."""

    STARTING = "starting"
    UP = "up"
    """It has been ready once, and listens."""
    DRAINING = "draining"
    FAILED = "failed"
    """It ended before it was ready."""
    ENDED = "ended"
    """It ended after it was told to."""


class Report(msgspec.Struct, frozen=True):
    """An actor's report on its server."""

    phase: Phase
    node_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    server: Server | None = None
    """The server's address, from UP on."""
    num_open: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Its sequences that run or wait."""
    reason: str = ""
    """The last line of a server that has FAILED."""


class ClusterError(Exception):
    """The cluster failed. The message is one line for the operator."""


class Cluster(Protocol):
    """The cluster that Ray runs, or a fake for tests. Methods raise ClusterError if the cluster does not answer."""

    def nodes(self) -> Sequence[str]:
        """Return the ids of the nodes that are alive and could run a server, in any order."""

    def numbers(self) -> set[int]:
        """Return the numbers of all servers that are placed."""

    def reports(self, numbers: Sequence[int]) -> dict[int, Report | None]:
        """Return these servers' reports: None for one that will not come back; no entry for those that do not answer
        now."""

    def place(self, number: int, node_id: str) -> None:
        """Start a server. If its process dies, it is started again there."""

    def drain(self, number: int) -> None:
        """Let the server finish its streams and end."""

    def remove(self, number: int) -> None:
        """Forget the server, and kill its remaining processes."""

    def want_nodes(self, count: int) -> None:
        """Ask the autoscaler for this many nodes. A cluster without one ignores it."""
