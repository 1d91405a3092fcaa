"""A cluster of which a test says what happens."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.fleet.cluster import ClusterError, Phase, Report, Server


class FakeCluster:
    def __init__(self, *nodes: str) -> None:
        self.alive = list(nodes)
        self.known: dict[int, Report | None] = {}
        self.silent: set[int] = set()
        """Servers that do not answer."""
        self.deaf: set[int] = set()
        """Servers that cannot be told to end."""
        self.is_away = False
        self.asked_nodes: list[int] = []
        self.removed: list[int] = []
        self.next_port = 1000

    def nodes(self) -> Sequence[str]:
        self._check()
        return self.alive

    def numbers(self) -> set[int]:
        self._check()
        return set(self.known)

    def reports(self, numbers: Sequence[int]) -> dict[int, Report | None]:
        self._check()
        return {number: self.known.get(number) for number in numbers if number not in self.silent}

    def place(self, number: int, node_id: str) -> None:
        assert number not in self.known
        assert node_id in self.alive
        self.known[number] = Report(Phase.STARTING, node_id)

    def drain(self, number: int) -> None:
        if number in self.deaf:
            raise ClusterError(f"actor {number} does not answer")
        self._change(number, Phase.DRAINING)

    def remove(self, number: int) -> None:
        self.removed.append(number)
        self.known.pop(number, None)

    def want_nodes(self, count: int) -> None:
        self.asked_nodes.append(count)

    def comes_up(self, *numbers: int, num_open: int = 0) -> None:
        for number in numbers:
            self.next_port += 1
            self._change(number, Phase.UP, Server(number, "10.0.0.1", self.next_port), num_open)

    def fails(self, number: int, reason: str) -> None:
        self._change(number, Phase.FAILED, reason=reason)

    def restarts(self, number: int) -> None:
        self._change(number, Phase.STARTING)

    def ends(self, number: int) -> None:
        self._change(number, Phase.ENDED)

    def loses_node(self, node_id: str) -> None:
        """Ray says so of the node at once, and of the actor later."""
        self.alive.remove(node_id)

    def node_of(self, number: int) -> str:
        report = self.known[number]
        assert report is not None
        return report.node_id

    def phase_of(self, number: int) -> Phase:
        report = self.known[number]
        assert report is not None
        return report.phase

    def _change(
        self, number: int, phase: Phase, server: Server | None = None, num_open: int = 0, reason: str = ""
    ) -> None:
        self.known[number] = Report(phase, self.node_of(number), server, num_open, reason)

    def _check(self) -> None:
        if self.is_away:
            raise ClusterError("Ray: gone")
