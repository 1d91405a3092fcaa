"""How `GpuClock` calls torch, tested without a GPU."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.tools.gpu.devices.timing import GpuClock

if TYPE_CHECKING:
    from collections.abc import Iterator


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        return

    def elapsed_time(self, _end: Event) -> float:
        """Milliseconds."""
        return 0.5


class Graphs:
    """torch's CUDA graphs: all write one shared tensor, which is made with the first graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seed: torch.Tensor | None = None
        for name, value in (("CUDAGraph", lambda: self), ("Event", Event), ("synchronize", lambda: None)):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    @contextmanager
    def capture(self, _graph: object) -> Iterator[None]:
        self._seed = torch.empty(1) if self._seed is None else self._seed
        self._seed.fill_(1)
        yield

    def replay(self) -> None:
        assert self._seed is not None
        self._seed.fill_(2)


def test_work_is_timed_while_a_graph_from_inference_mode_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    with torch.inference_mode(), torch.cuda.graph(graphs):  # type: ignore[arg-type]
        pass
    numbers = torch.zeros(2)
    # A replay takes 0.5 ms, so the two variants are repeated four times to last 2 ms.
    assert GpuClock().work_us([lambda: numbers.add_(1), lambda: numbers.add_(1)]) == 500.0 / 8
    assert numbers.tolist() == [2 + 2 + 8] * 2
