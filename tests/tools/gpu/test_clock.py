"""How `GpuClock` calls torch, and what is said of clocks and power, without a GPU."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.tools.gpu.clocks import ClockLog, Sample, in_words
from penstock.tools.gpu.devices.timing import GpuClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
        self.num_replays = 0
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
        self.num_replays += 1


def test_candidates_are_timed_in_turns_while_a_graph_from_inference_mode_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = Graphs(monkeypatch)
    with torch.inference_mode(), torch.cuda.graph(graphs):  # type: ignore[arg-type]
        pass
    numbers = torch.zeros(2)
    twice, once = [lambda: numbers.add_(1), lambda: numbers.add_(1)], [lambda: numbers.add_(0)]
    # A replay takes 0.5 ms, so a candidate's works are repeated four times to last 2 ms.
    assert GpuClock().work_us(twice, once) == [500.0 / 8, 500.0 / 4]
    assert numbers.tolist() == [2 + 2 + 8] * 2
    assert graphs.num_replays == 2 + 2 * 6


def test_clocks_are_read_from_nvidia_smi_and_told_for_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '1980, 2619, 612.50, 55'\necho '[N/A], 2619, 1.00, 30'\necho done\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with ClockLog() as log:
        log._reader.join()
    assert [(sample.sm_mhz, sample.watts) for sample in log.samples] == [(1980.0, 612.5), (-1.0, 1.0)]
    samples = [Sample(1.0, 1980.0, 2619.0, 600.0, 50.0), Sample(2.0, 1755.0, 2619.0, 700.0, 60.0)]
    assert in_words(samples, 0.5, 2.5) == "1755 to 1980 MHz, 650 W, 60 °C"
    assert in_words(samples, 3.0, 4.0) == ""
    monkeypatch.setenv("PATH", "")
    with ClockLog() as log:
        assert not log.samples
