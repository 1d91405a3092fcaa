"""Chooses the replica of a request: where an equal one runs, else where its prefix is cached, else the least loaded."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.shm.client.capacity import HEARTBEAT_LIMIT_S
from penstock.shm.client.client import BackendClient
from penstock.shm.client.streams.open_stream import OpenStream
from penstock.shm.link.listening_address import holder_pid
from penstock.shm.memory.board import Board
from penstock.shm.memory.page_digest import PageDigest, page_names
from penstock.shm.memory.prefix_table import Owner, PrefixTable
from penstock.shm.messages import Generate, ModelCard, Pool, PromptHeader, Request

_OPEN = Board.TOTALS + "requests_open"
_MAX_OVER_MEAN = 1.25
_SLACK = 8
"""A replica keeps the requests of its prefixes while it has at most a quarter more than the mean, and 8."""


class Replica:
    """One backend of a set, and its load."""

    def __init__(self, index: int, name: str, client: BackendClient) -> None:
        self.index = index
        self.name = name
        self.client = client
        self.hands_over = False
        """Its streams are moving away, one by one."""
        self.offered: ModelCard | None = None
        """The model of the backend that connected last, whether or not it was accepted."""
        self._shown = -1
        self._own_then = 0

    @property
    def title(self) -> str:
        """The replica's name for log lines."""
        return f"replica {self.name}" if self.name else "the backend"

    @property
    def load(self) -> int:
        """Open requests of all frontends: those that the board shows, and those that this process has added since."""
        board = self.client.backend_board
        own = self.client.board.requests_open
        shown: int = 0 if board is None else getattr(board, _OPEN)
        if shown != self._shown:
            self._shown, self._own_then = shown, own
        return max(0, shown + own - self._own_then)

    @property
    def computes(self) -> bool:
        """It is connected and makes progress, whether or not it accepts new requests."""
        board = self.client.backend_board
        return board is not None and board.seconds_since_beat() < HEARTBEAT_LIMIT_S

    def has_adapter(self, adapter_id: str) -> bool:
        """A request without an adapter has an empty id."""
        if not adapter_id:
            return True
        model = self.client.model
        return model is not None and any(adapter.adapter_id == adapter_id for adapter in model.adapters)

    @property
    def digest(self) -> PageDigest | None:
        """The digest of its cached pages; None if it is not connected or has no pages."""
        board = self.client.backend_board
        return None if board is None else board.digest

    @property
    def owner(self) -> Owner:
        board = self.client.backend_board
        return Owner(self.index, 0 if board is None else board.pid & 0xFF)


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


class ReplicaChooser:
    """Orders replicas for a request. It keeps no state but the table."""

    def __init__(self, table: PrefixTable) -> None:
        self._table = table

    def place(self, replicas: Sequence[Replica], message: Request, tokens: array[int]) -> Replica:
        """Choose the replica that should compute the request, and remember it for later requests.

        If none has the request's adapter, the chosen replica refuses it.
        """
        if not isinstance(message, PromptHeader):
            return replicas[0]
        replicas = [replica for replica in replicas if replica.has_adapter(message.adapter)] or replicas
        if isinstance(message, Pool):  # one that has refused an input says when it takes some again
            replicas = [replica for replica in replicas if replica.client.has_room] or replicas
        prompt, salt = tokens[: message.num_prompt_tokens], message.own_salt
        names = self._table.names(prompt, salt)
        twin = self._name_of(prompt, message)
        chosen = replicas[0]
        if len(replicas) > 1:
            chosen = self._choose(replicas, prompt, salt, names, twin)
        owner = chosen.owner
        for name in names:
            self._table.note(name, owner)
        if twin is not None:
            self._table.note(twin, owner)
        return chosen

    def twin_of(self, stream: OpenStream) -> int | None:
        """A number that equal requests have in common; None for one that shares with no other."""
        return self._name_of(stream.tokens[: stream.num_prompt_tokens], stream.message)

    def _name_of(self, prompt: array[int], message: Request) -> int | None:
        match message:
            case Generate(may_share=True):
                settings: object = (message.sampling, message.constraints, message.num_prompt_logprobs)
            case Pool(may_share=True):
                settings = message.pooled
            case _:
                return None
        return self._table.name_of(prompt, message.own_salt, msgspec.msgpack.encode(settings))

    def _choose(
        self, replicas: Sequence[Replica], prompt: array[int], salt: bytes, names: list[int], twin: int | None
    ) -> Replica:
        by_owner = {replica.owner: replica for replica in replicas}
        if twin is not None and (running := self._find(twin, by_owner)) is not None:
            return running  # it adds no load: the two share one sequence
        loads = {replica: replica.load for replica in replicas}
        most = _MAX_OVER_MEAN * sum(loads.values()) / len(loads) + _SLACK
        # If no replica has a page of it, one may still be computing it: the table knows which.
        candidates = _longest_cached([one for one in replicas if loads[one] <= most], prompt, salt) or replicas
        for name in reversed(names):
            found = self._find(name, by_owner)
            if found is not None and found in candidates and loads[found] <= most:
                return found
        # Among equally loaded replicas, all workers choose the same one for a prompt without asking each other.
        turn = names[0] if names else 0
        return min(candidates, key=lambda replica: (loads[replica], (replica.index + turn) % len(replicas)))

    def _find(self, name: int, by_owner: dict[Owner, Replica]) -> Replica | None:
        owner = self._table.find(name)
        return None if owner is None else by_owner.get(owner)


def _longest_cached(replicas: Sequence[Replica], prompt: array[int], salt: bytes) -> list[Replica]:
    """The replicas with the longest cached beginning of the prompt; none if no replica has a page of it."""
    names: dict[int, list[int]] = {}
    num_cached: dict[Replica, int] = {}
    for replica in replicas:
        if (digest := replica.digest) is not None:
            size = digest.page_size_tokens
            if size not in names:
                names[size] = page_names(prompt, salt, size)
            num_cached[replica] = digest.num_cached_tokens(names[size])
    longest = max(num_cached.values(), default=0)
    return [replica for replica, count in num_cached.items() if count == longest > 0]
