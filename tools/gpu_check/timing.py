"""How long work on the GPU takes: replayed from a graph, over buffers that no cache can hold, by the device's clock."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ROUNDS = 5


def graph_us(variants: Sequence[Callable[[], object]], *, min_us: float = 2_000.0) -> float:
    """Microseconds of one call, median of five rounds.

    variants do the same work on different buffers, in turn: together they should be larger than the L2 cache. They are
    captured in one graph, whose replay is timed by events; a short one is captured several times over, until a replay
    lasts min_us.
    """
    for variant in variants:
        variant()
    torch.cuda.synchronize()
    once_us = _replay_us(_capture(variants, 1))
    repeats = max(1, round(min_us / max(once_us, 0.1)))
    graph = _capture(variants, repeats)
    _replay_us(graph)
    rounds = [_replay_us(graph) for _ in range(_ROUNDS)]
    return statistics.median(rounds) / (repeats * len(variants))


def _capture(variants: Sequence[Callable[[], object]], repeats: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for variant in variants:
                variant()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1_000.0
