"""Steps that leave nonsense where they have written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backend.forward_pass import NOT_FINITE, StepOutput
from tests.simulation.violations import PlantedFault

if TYPE_CHECKING:
    from collections.abc import Iterable


class Writers:
    """The step that wrote last to each place of a cache."""

    def __init__(self) -> None:
        self._step = 0
        self._steps: dict[int, int] = {}

    def note(self, places: Iterable[int]) -> None:
        self._steps |= dict.fromkeys(places, self._step)

    def end_step(self) -> tuple[dict[int, int], int]:
        """What `SkippableStep` needs."""
        self._step += 1
        return self._steps, self._step - 1


@dataclass(frozen=True, slots=True)
class SkippableStep:
    """Implements `ISkippableOutput`: nobody needs it any more. What later steps have written stays."""

    output: StepOutput
    cells: list[int]
    writers: tuple[dict[int, int], int]

    def wait(self) -> StepOutput:
        return self.output

    def skip(self) -> None:
        steps, mine = self.writers
        for place in [place for place, step in steps.items() if step == mine]:
            self.cells[place] ^= 0x0F0F0F0F if self.cells[place] > 0 else 0
        self.output.token_ids.fill(NOT_FINITE)


class LostStep:
    """A step whose device computed nonsense, and reports it when it is waited for."""

    def wait(self) -> StepOutput:
        raise PlantedFault("while the step was waited for")
