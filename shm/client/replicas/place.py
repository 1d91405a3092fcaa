"""A socket path, and the backends behind it: one, or two while a new one takes the path over from the old one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.shm.link.listening_address import holder_pid

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.shm.client.replicas.replica_chooser import Replica


class Place:
    """Replicas of one path, which have the same index and name."""

    def __init__(self, index: int, path: Path, replica: Replica) -> None:
        self.index = index
        self.path = path
        self.replicas = [replica]
        """At most two; the last one is the path's."""
        self.is_dropped = False
        """The path has gone from the directory of sockets."""

    @property
    def newest(self) -> Replica:
        return self.replicas[-1]

    def is_leaving(self, replica: Replica) -> bool:
        """Whether the replica receives nothing new: its path has gone, or its successor is ready."""
        return self.is_dropped or (replica is not self.newest and self.newest.client.ready)

    def was_taken_over(self) -> bool:
        """Whether the path belongs to another backend than the one that is connected."""
        if len(self.replicas) > 1:
            return False
        board = self.newest.client.backend_board
        return board is not None and holder_pid(self.path) not in (None, board.pid)
