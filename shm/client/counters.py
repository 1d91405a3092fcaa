"""The numbers of this process, which outlive the boards that show them."""

from __future__ import annotations

from penstock.shm.memory.board import FrontendBoard
from penstock.shm.messages import Finish

_OUTCOMES: dict[Finish, str] = {
    finish: f"requests_{finish.name.lower()}" for finish in Finish if finish is not Finish.NONE
}
"""The board's field for each finish."""


class ClientCounters:
    """Counts on the board of the present session; without a session, on a private board."""

    def __init__(self) -> None:
        self.board = FrontendBoard.private()
        self._counted_before = dict.fromkeys(FrontendBoard.fields, 0)  # on the boards of earlier backends

    def move_to(self, board: FrontendBoard) -> None:
        """Count on this board from now on; it also receives what was counted since the last session."""
        board.add(self.board)
        self.board.close()
        self.board = board

    def leave_board(self, num_open: int) -> None:
        """The session is about to end, and its board with it."""
        self._counted_before = {
            name: value + self._counted_before[name] for name, value in self.board.values().items()
        } | {"requests_open": 0}
        self.board = FrontendBoard.private()
        self.board.requests_open = num_open

    def add(self, numbers: dict[str, int]) -> None:
        """Add the totals of counters that no longer count."""
        for name, value in numbers.items():
            self._counted_before[name] += value if name != "requests_open" else 0

    def totals(self, num_open: int) -> dict[str, int]:
        """The numbers since this process started."""
        now = self.board.values()
        counted = {name: value + self._counted_before[name] for name, value in now.items() if name != "pid"}
        return counted | {"requests_open": num_open}

    def count_finish(self, finish: Finish, num_open: int) -> None:
        self.board.increase(_OUTCOMES[finish])
        self.board.requests_open = num_open
