"""Servers on a cluster: where they are placed, when they are replaced, and what the router learns of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from penstock.serve.fleet.cluster import Phase, Server
from penstock.serve.fleet.keeper import DOWN_WINDOW_S, UP_WINDOW_S, Bounds, CannotStart, Keeper, Scaling
from penstock.serve.fleet.router import RouterError
from tests.serve.fleet.fake_cluster import FakeCluster


class World:
    """A keeper, its cluster, and a clock that turns it once a second."""

    def __init__(self, cluster: FakeCluster, bounds: Bounds) -> None:
        self.cluster = cluster
        self.bounds = bounds
        self.published: list[list[int]] = []
        self.router_fails = False
        self.log: list[str] = []
        self.now_s = 0.0
        self.start_keeper()

    def start_keeper(self) -> None:
        self.keeper = Keeper(self.cluster, Scaling(self.bounds), self._publish, self.log.append)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.keeper.turn(self.now_s)
            self.now_s += 1.0

    def _publish(self, servers: Sequence[Server]) -> None:
        if self.router_fails:
            raise RouterError("the disk is full")
        # A server is told to end only after the router has learned of it.
        assert all(self.cluster.phase_of(server.number) is not Phase.DRAINING for server in servers)
        self.published.append([server.number for server in servers])


@pytest.fixture
def world() -> World:
    """Two servers that are up, on two of three nodes."""
    world = World(FakeCluster("a", "b", "c"), Bounds(2, 2))
    world.turn()
    world.cluster.comes_up(0, 1)
    world.turn()
    return world


def test_each_server_gets_a_node_of_its_own(world: World) -> None:
    assert {world.cluster.node_of(number) for number in (0, 1)} == {"a", "b"}
    assert world.published == [[], [0, 1]]
    assert world.cluster.asked_nodes == [2]
    world.turn(5)
    assert world.published == [[], [0, 1]]


def test_servers_without_a_node_wait_for_one() -> None:
    world = World(FakeCluster("a"), Bounds(3, 3))
    world.turn(3)
    assert world.cluster.known.keys() == {0}
    assert world.log.count("2 of 3 servers wait for a node") == 1
    world.cluster.alive += ["b", "c"]
    world.turn()
    assert world.cluster.known.keys() == {0, 1, 2}


def test_server_of_a_dead_node_is_replaced_elsewhere(world: World) -> None:
    lost = world.cluster.node_of(0)
    world.cluster.loses_node(lost)
    world.turn()
    assert world.published[-1] == [1]
    assert world.cluster.removed == [0]
    assert world.cluster.node_of(0) == "c"
    world.cluster.comes_up(0)
    world.turn()
    assert world.published[-1] == [0, 1]


def test_dead_actor_is_replaced(world: World) -> None:
    world.cluster.known[1] = None
    world.turn()
    assert world.published[-1] == [0]
    assert world.cluster.phase_of(1) is Phase.STARTING


def test_server_that_restarts_on_its_node_stays_in_the_list_until_its_address_changes(world: World) -> None:
    before = list(world.keeper.servers)
    world.cluster.silent.add(1)
    world.turn(3)
    world.cluster.silent.clear()
    world.cluster.restarts(1)
    world.turn(3)
    assert world.keeper.servers == before
    world.cluster.comes_up(1)
    world.turn()
    assert world.keeper.servers[1] != before[1]
    assert world.published == [[], [0, 1], [0, 1]]


def test_first_server_that_cannot_start_ends_the_command() -> None:
    world = World(FakeCluster("a", "b"), Bounds(2, 2))
    world.turn()
    world.cluster.fails(1, "no such model")
    with pytest.raises(CannotStart, match="no such model"):
        world.turn()


def test_later_failures_are_tried_again_with_growing_pauses(world: World) -> None:
    starts = []
    world.cluster.known[1] = None  # its node has no room for the model any longer
    for _ in range(200):
        world.turn()
        if 1 in world.cluster.known and world.cluster.phase_of(1) is Phase.STARTING:
            starts.append(world.now_s)
            world.cluster.fails(1, "out of memory")
    pauses = [late - early for early, late in itertools.pairwise(starts)]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 3.0
    assert 30.0 <= pauses[-1] <= 62.0
    assert world.published[-1] == [0]


def test_cluster_that_is_away_changes_nothing(world: World) -> None:
    world.cluster.is_away = True
    world.turn(3)
    assert world.published == [[], [0, 1]]
    assert "Ray: gone; servers and router go on" in world.log


def test_list_that_could_not_be_published_is_published_again(world: World) -> None:
    world.cluster.known[1] = None
    world.router_fails = True
    for _ in range(2):
        with pytest.raises(RouterError):
            world.turn()
    world.router_fails = False
    world.turn()
    assert world.published[-1] == [0]


def test_second_keeper_goes_on_where_the_first_has_ended(world: World) -> None:
    world.start_keeper()
    world.turn(3)
    assert world.published == [[], [0, 1], [0, 1]]
    assert world.cluster.removed == []


def test_second_keeper_replaces_a_server_that_failed_meanwhile_beside_one_that_is_up(world: World) -> None:
    world.cluster.fails(0, "no memory")
    world.start_keeper()
    world.turn()
    assert world.published[-1] == [1]
    assert world.cluster.phase_of(1) is Phase.UP
    world.turn(3)
    assert world.cluster.phase_of(0) is Phase.STARTING


def test_second_keeper_keeps_the_servers_that_the_load_brought() -> None:
    world = World(FakeCluster("a", "b", "c"), Bounds(3, 3))
    world.turn()
    world.cluster.comes_up(0, 1, 2, num_open=3)
    world.bounds = Bounds(1, 3, open_requests=10)
    world.start_keeper()
    world.turn(int(DOWN_WINDOW_S) - int(UP_WINDOW_S) - 1)
    assert world.published[-1] == [0, 1, 2]
    world.turn(5)
    assert world.published[-1] == [0]  # they were not needed for so long


def test_second_keeper_with_fewer_servers_drains_the_others(world: World) -> None:
    world.bounds = Bounds(1, 1)
    world.start_keeper()
    world.turn(2)
    assert world.published[-1] == [0]
    assert world.cluster.phase_of(1) is Phase.DRAINING
    world.cluster.ends(1)
    world.turn()
    assert world.cluster.removed == [1]
    world.turn()
    assert world.cluster.known.keys() == {0}


def test_load_brings_servers_and_its_absence_drains_them() -> None:
    world = World(FakeCluster("a", "b", "c"), Bounds(1, 3, open_requests=10))
    world.turn()
    world.cluster.comes_up(0, num_open=25)
    world.turn(int(UP_WINDOW_S) - 2)
    assert world.cluster.known.keys() == {0}  # a moment's load does not
    world.turn(5)
    assert world.cluster.known.keys() == {0, 1, 2}
    assert world.cluster.asked_nodes == [1, 3]
    world.cluster.comes_up(0, 1, 2, num_open=3)
    world.turn(int(DOWN_WINDOW_S) - 5)
    assert world.published[-1] == [0, 1, 2]
    world.turn(20)
    assert world.published[-1] == [0]
    assert world.cluster.phase_of(2) is Phase.DRAINING
    assert world.cluster.asked_nodes == [1, 3, 1]


def test_number_of_servers_keeps_its_bounds() -> None:
    scaling = Scaling(Bounds(2, 4, open_requests=1))
    assert {scaling.note(1000, float(second)) for second in range(60)} == {2, 4}
    assert {scaling.note(0, 60.0 + second) for second in range(1000)} == {2, 4}
    fixed = Scaling(Bounds(3, 3))
    assert {fixed.note(1000, float(second)) for second in range(60)} == {3}
