"""The policies that `penstock bench fleet` compares: how a request finds its backend among many."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, cast

from penstock.shm.client.replicas.routing import Router
from penstock.shm.memory.prefix_table import Owner, PrefixTable

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Mapping, Sequence

    from penstock.shm.messages import Generate

CELL_SIZE = 32
"""Backends that one prefix table serves, behind a ring of cells."""
_RING_POINTS = 64
"""Points of a member of a ring; with 64 the largest arc is about a third above the mean."""
_MAX_OVER_MEAN = 1.25
_SLACK = 8
_NAME_TOKENS = 64
_KEY = bytes(32)


class Place(Protocol):
    """A backend, as a policy sees it."""

    index: int

    @property
    def load(self) -> int:
        """Open requests."""

    @property
    def owner(self) -> Owner:
        """The backend's present life, as a prefix table stores it."""


class Policy(Protocol):
    def place(self, alive: Sequence[Place], message: Generate, tokens: array[int]) -> Place:
        """Choose one of the backends that are alive, of which there is at least one."""


class RoundRobin:
    def __init__(self) -> None:
        self._turn = itertools.count()

    def place(self, alive: Sequence[Place], _message: Generate, _tokens: array[int]) -> Place:
        return alive[next(self._turn) % len(alive)]


class LeastLoaded:
    def place(self, alive: Sequence[Place], _message: Generate, _tokens: array[int]) -> Place:
        return min(alive, key=lambda place: place.load)


class _Ring:
    """Consistent hashing with bounded loads (arXiv 1608.01350): a key goes to the next member that has room."""

    def __init__(self, num_members: int) -> None:
        points = [
            (_hash(b"%d/%d" % (member, point)), member)
            for member in range(num_members)
            for point in range(_RING_POINTS)
        ]
        points.sort()
        self._hashes = [point for point, _ in points]
        self._members = [member for _, member in points]

    def find(self, key: bytes, loads: Mapping[int, float]) -> int:
        """The key's member among those in loads; its load is at most a quarter above the mean."""
        most = _MAX_OVER_MEAN * sum(loads.values()) / len(loads) + _SLACK
        start = bisect_left(self._hashes, _hash(key))
        for point in range(start, start + len(self._members)):
            member = self._members[point % len(self._members)]
            if loads.get(member, most + 1) <= most:
                return member
        raise AssertionError("the least loaded member has at most the mean")


class HashRing:
    """The policy of a proxy that knows a request's first tokens and its own open requests, and keeps no table."""

    def __init__(self, num_backends: int) -> None:
        self._ring = _Ring(num_backends)

    def place(self, alive: Sequence[Place], _message: Generate, tokens: array[int]) -> Place:
        by_index = {place.index: place for place in alive}
        return by_index[self._ring.find(_first_name(tokens), {place.index: place.load for place in alive})]


class PrefixRouting:
    """The router of `ReplicaSet`, with one table for all backends: at most MAX_REPLICAS."""

    def __init__(self) -> None:
        self._router = Router(PrefixTable.private(_KEY))

    def place(self, alive: Sequence[Place], message: Generate, tokens: array[int]) -> Place:
        return cast("Place", self._router.place(cast("Any", alive), message, tokens))


class Cells:
    """A ring of cells; in each cell, `PrefixRouting` over its backends."""

    def __init__(self, num_backends: int) -> None:
        num_cells = -(-num_backends // CELL_SIZE)
        self._ring = _Ring(num_cells)
        self._routers = [PrefixRouting() for _ in range(num_cells)]

    def place(self, alive: Sequence[Place], message: Generate, tokens: array[int]) -> Place:
        cells: dict[int, list[Place]] = {}
        for place in alive:
            cells.setdefault(place.index // CELL_SIZE, []).append(place)
        loads = {cell: sum(place.load for place in members) / len(members) for cell, members in cells.items()}
        cell = self._ring.find(_first_name(tokens), loads)
        return self._routers[cell].place(cells[cell], message, tokens)


POLICIES: dict[str, Callable[[int], Policy]] = {
    "round robin": lambda _num_backends: RoundRobin(),
    "least loaded": lambda _num_backends: LeastLoaded(),
    "hash ring": HashRing,
    "prefix table": lambda _num_backends: PrefixRouting(),
    "cells": Cells,
}


def _hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


def _first_name(tokens: array[int]) -> bytes:
    return tokens[:_NAME_TOKENS].tobytes()
