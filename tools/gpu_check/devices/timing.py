"""How long work on the GPU takes: replayed from a graph, over buffers that no cache can hold, by the device's clock."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ROUNDS = 5
_MIN_REPLAY_US = 2_000.0
_MAX_REPEATS = 2_000
_HEAD_START_CYCLES = 8_000_000
"""Some 5 ms, in which the host puts the work into the stream."""


class Clock(Protocol):
    def work_us(self, variants: Sequence[Callable[[], object]]) -> float:
        """Microseconds of one call, without what the host takes to launch it.

        variants do the same work on different buffers, in turn: together they should be larger than the L2 cache.
        """
        ...

    def once_us(self, work: Callable[[], object]) -> float:
        """Microseconds on the device of work that cannot be repeated, and takes the host less than 5 ms to launch."""
        ...


class GpuClock:
    """`work_us` is captured in one graph, whose replay is timed by events: the median of five; a short one several
    times over, until a replay lasts 2 ms."""

    # Graphs share tensors that torch makes with the first one and writes with each (ATen/cuda/CUDAGeneratorImpl.cpp).
    # Where a pass's graphs came first, none but inference mode may write them: torch issue 166792.
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
