"""Times GPU work by the device's clock: replayed from graphs in turns, over buffers larger than the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

_ROUNDS = 5
_MIN_REPLAY_US = 2_000.0
_MAX_REPEATS = 2_000
Works = Sequence[Callable[[], object]]
"""The same work on different buffers, which together should be larger than the L2 cache."""


class Clock(Protocol):
    def work_us(self, *candidates: Works) -> list[float]:
        """Microseconds per work of each candidate, without the host's launch time; they are timed in turns."""


class GpuClock:
    """`work_us` times replays of captured graphs with events: the median of five rounds, each with every candidate.

    Short work is repeated in the graph until a replay lasts 2 ms.
    """

    # torch makes tensors with the first graph and writes them with each graph (ATen/cuda/CUDAGeneratorImpl.cpp).
    # If a pass made the first graph, only inference mode may write them: torch issue 166792.
    @torch.inference_mode()
    def work_us(self, *candidates: Works) -> list[float]:
        graphs = [_repeated(works) for works in candidates]
        rounds = [[_replay_us(graph) / count for graph, count in graphs] for _ in range(_ROUNDS + 1)]
        return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


def _repeated(works: Works) -> tuple[torch.cuda.CUDAGraph, int]:
    """Return a graph of the works, repeated, and how many works it has."""
    for work in works:
        work()
    torch.cuda.synchronize()
    once_us = _replay_us(_capture(works, 1))
    repeats = min(max(1, round(_MIN_REPLAY_US / max(once_us, 0.1))), _MAX_REPEATS)
    return _capture(works, repeats), repeats * len(works)


def _capture(works: Works, repeats: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for work in works:
                work()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = _events()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1_000.0


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
