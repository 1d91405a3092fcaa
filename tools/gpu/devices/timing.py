"""Times GPU work by the device's clock: replayed from a graph, over buffers larger than the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

_ROUNDS = 5
_MIN_REPLAY_US = 2_000.0
_MAX_REPEATS = 2_000
_HEAD_START_CYCLES = 8_000_000
"""About 5 ms, during which the host submits the work to the stream."""


class Clock(Protocol):
    def work_us(self, variants: Sequence[Callable[[], object]]) -> float:
        """Microseconds per call, without the host's launch time.

        variants do the same work on different buffers, which together should be larger than the L2 cache.
        """

    def once_us(self, work: Callable[[], object]) -> float:
        """Device time in microseconds of work that cannot be repeated. Launching it must take the host under 5 ms."""


class GpuClock:
    """`work_us` times replays of one captured graph with events and returns the median of five.

    Short work is repeated in the graph until a replay lasts 2 ms.
    """

    # torch makes tensors with the first graph and writes them with each graph (ATen/cuda/CUDAGeneratorImpl.cpp).
    # If a pass made the first graph, only inference mode may write them: torch issue 166792.
    @torch.inference_mode()
    def work_us(self, variants: Sequence[Callable[[], object]]) -> float:
        for variant in variants:
            variant()
        torch.cuda.synchronize()
        once_us = _replay_us(_capture(variants, 1))
        repeats = min(max(1, round(_MIN_REPLAY_US / max(once_us, 0.1))), _MAX_REPEATS)
        graph = _capture(variants, repeats)
        _replay_us(graph)
        rounds = [_replay_us(graph) for _ in range(_ROUNDS)]
        return statistics.median(rounds) / (repeats * len(variants))

    def once_us(self, work: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        start, end = _events()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1_000.0


def _capture(variants: Sequence[Callable[[], object]], repeats: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for variant in variants:
                variant()
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
