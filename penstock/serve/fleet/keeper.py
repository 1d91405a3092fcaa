"""The loop of `penstock ray up`: chooses the number of servers, places them, replaces lost ones, and publishes the list
of those that are up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.serve.fleet.cluster import Cluster, ClusterError, Phase, Report, Server

UP_WINDOW_S = 10.0
DOWN_WINDOW_S = 300.0


@dataclass(frozen=True, slots=True)
class Bounds:
    least: int
    most: int
    open_requests: int = 0
    """Target of running and waiting sequences for one server; 0 keeps the least number of servers."""


class Scaling:
    """Smooths the target: more servers once the load has needed them for UP_WINDOW_S, fewer once it has not for
    DOWN_WINDOW_S."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._asked: deque[tuple[float, int]] = deque()
        """When, and the number that the load at that moment asked for. A window's length, oldest first."""
        self.wanted = bounds.least

    def start_from(self, num_servers: int) -> None:
        """Begin with this many servers, within the bounds."""
        self.wanted = min(max(num_servers, self._bounds.least), self._bounds.most)

    def note(self, num_open: int, now_s: float) -> int:
        """Note the open requests of all servers; return the number of servers that should run."""
        bounds = self._bounds
        if not bounds.open_requests:
            return self.wanted
        needed = math.ceil(num_open / bounds.open_requests)
        self._asked.append((now_s, min(max(needed, bounds.least), bounds.most)))
        while self._asked[0][0] < now_s - DOWN_WINDOW_S:
            self._asked.popleft()
        lately = [number for then_s, number in self._asked if then_s >= now_s - UP_WINDOW_S]
        if now_s - self._asked[0][0] >= UP_WINDOW_S:
            self.wanted = max(self.wanted, min(lately))
        if now_s - self._asked[0][0] >= DOWN_WINDOW_S - UP_WINDOW_S:
            self.wanted = min(self.wanted, max(number for _, number in self._asked))
        return self.wanted


_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class CannotStart(Exception):
    """The first server ended before it was ready, as others would. The message is its last line."""


@dataclass(slots=True)
class _Place:
    """One server's number and state."""

    is_placed: bool = False
    node_id: str | None = None
    """None until a server that another keeper placed has reported."""
    server: Server | None = None
    """The last known server. While it is restarted on its node, this is stale and costs the router retries."""
    num_open: int = 0
    is_leaving: bool = False
    is_told: bool = False
    """It has been told to drain."""
    num_failures: int = 0
    retry_at_s: float = 0.0


@dataclass(slots=True)
class Keeper:
    """Keeps the servers running.

    All lasting state is in the cluster: a second keeper with the same options continues where one has ended.
    """

    cluster: Cluster
    scaling: Scaling
    publish: Callable[[Sequence[Server]], None]
    log: Callable[[str], None]
    _places: dict[int, _Place] = field(default_factory=dict)
    _published: Sequence[Server] | None = None
    _num_asked_nodes: int = 0
    _has_looked: bool = False
    _has_been_up: bool = False
    _num_waiting: int = 0
    """Servers that wait for a node, as last logged."""

    def turn(self, now_s: float) -> None:
        """Do the work that is due. Raises CannotStart, and any error of publish: the next turn publishes again."""
        try:
            self._look(now_s)
            wanted = self.scaling.note(sum(place.num_open for place in self._places.values()), now_s)
            if wanted != self._num_asked_nodes:
                self.cluster.want_nodes(wanted)
                self._num_asked_nodes = wanted
            self._place_missing(wanted, now_s)
            self._choose_leavers(wanted)
        except ClusterError as error:
            self.log(f"{error}; servers and router go on")
        if self._published != (servers := self.servers):
            self.publish(servers)
            self._published = servers
            self.log(f"the router has {len(servers)} servers: {', '.join(map(_shown, servers)) or 'none'}")
        self._drain_leavers()

    @property
    def servers(self) -> Sequence[Server]:
        """The servers for the router, by number. The router checks itself which of them are ready."""
        places = (place for _, place in sorted(self._places.items()))
        return [place.server for place in places if place.server is not None and not place.is_leaving]

    def _look(self, now_s: float) -> None:
        for number in self.cluster.numbers():
            self._places.setdefault(number, _Place()).is_placed = True
        alive = set(self.cluster.nodes())
        placed = [number for number, place in self._places.items() if place.is_placed]
        reports = self.cluster.reports(placed)
        self._has_been_up |= any(report is not None and report.phase is Phase.UP for report in reports.values())
        for number in placed:
            place, report = self._places[number], reports.get(number)
            if place.node_id is not None and place.node_id not in alive:
                self._lose(number, place, "its node is gone", now_s)
            elif number not in reports:
                continue  # it does not answer now
            elif report is None:
                self._lose(number, place, "its actor has died", now_s)
            elif report.phase is Phase.FAILED:
                if not self._has_been_up:
                    raise CannotStart(report.reason)
                self._lose(number, place, f"it does not start: {report.reason}", now_s)
            elif report.phase is Phase.ENDED:
                self.log(f"server {number} has ended")
                self.cluster.remove(number)
                del self._places[number]
            else:
                self._note(place, report)
        if not self._has_looked:  # servers that the load brought under an earlier keeper
            self.scaling.start_from(1 + max((number for number in placed if self._stays(number)), default=-1))
            self._has_looked = True

    def _stays(self, number: int) -> bool:
        place = self._places.get(number)
        return place is not None and place.is_placed and not place.is_leaving

    def _note(self, place: _Place, report: Report) -> None:
        place.node_id, place.num_open = report.node_id, report.num_open
        if report.phase is Phase.DRAINING:
            place.is_leaving = place.is_told = True
        elif report.phase is Phase.UP:
            place.server, place.num_failures = report.server, 0

    def _lose(self, number: int, place: _Place, why: str, now_s: float) -> None:
        """Note a lost server. Its successor is placed at once, or after a growing pause if the start failed."""
        self.log(f"server {number} is lost: {why}")
        self.cluster.remove(number)
        pause_s = 0.0 if place.server else min(_FIRST_PAUSE_S * 2.0**place.num_failures, _LONGEST_PAUSE_S)
        failures = 0 if place.server else min(place.num_failures + 1, 16)
        self._places[number] = _Place(num_failures=failures, retry_at_s=now_s + pause_s)

    def _place_missing(self, wanted: int, now_s: float) -> None:
        """Give each number a node that has no server of ours."""
        taken = {place.node_id for place in self._places.values()}
        free = sorted(set(self.cluster.nodes()) - taken)
        places = [self._places.setdefault(number, _Place()) for number in range(wanted)]
        missing = [number for number, place in enumerate(places) if not place.is_placed]
        due = [number for number in missing if places[number].retry_at_s <= now_s]
        for number, node_id in zip(due, free, strict=False):
            self.cluster.place(number, node_id)
            places[number].is_placed, places[number].node_id = True, node_id
            self.log(f"server {number} starts on node {node_id[:8]}")
        num_waiting = max(0, len(due) - len(free))
        if num_waiting > self._num_waiting:
            self.log(f"{num_waiting} of {wanted} servers wait for a node")
        self._num_waiting = num_waiting

    def _choose_leavers(self, wanted: int) -> None:
        for number in [number for number in self._places if number >= wanted]:
            place = self._places[number]
            if not place.is_placed:
                del self._places[number]
            elif not place.is_leaving:
                place.is_leaving = True
                self.log(f"server {number} is not needed any longer")

    def _drain_leavers(self) -> None:
        """Drain servers once the router no longer knows them. A request that still arrives is retried at another
        server."""
        for number, place in self._places.items():
            if place.is_leaving and not place.is_told:
                try:
                    self.cluster.drain(number)
                    place.is_told = True
                except ClusterError as error:
                    self.log(f"server {number} cannot be told to end: {error}")


def _shown(server: Server) -> str:
    return f"{server.number} at {server.address}"
