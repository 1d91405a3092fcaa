"""The keeper's interface to a cluster: nodes, and one server on each that it places there."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec

from penstock.serve.fleet.servers import Server

if TYPE_CHECKING:
    from collections.abc import Sequence


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
