"""Captures steps as CUDA graphs, one for each padded size, and replays them."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from penstock.backend.checkpoint.files.progress import GRAPHS, make_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backend.checkpoint.files.progress import Work
    from penstock.backend.passes.cuda.device.device import Device, Graph

MAX_GRAPH_ROWS = 256
"""Larger steps keep the device busy for long enough to launch their kernels one by one."""
_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8


def graph_sizes(max_rows: int) -> list[int]:
    """Return 1, 2, 4, 8, 16, 24 and so on; the last size is the largest captured decode step."""
    most = min(max_rows, MAX_GRAPH_ROWS)
    return sorted({*(size for size in (*_SMALL_SIZES, *range(_SIZE_STEP, most, _SIZE_STEP)) if size < most), most})


class StepGraphs:
    """Each graph reads its step from fixed addresses. Rows or tokens beyond the step's own are padding."""

    def __init__(self, device: Device, sizes: Sequence[int], run: Callable[[int], None], work: Work = GRAPHS) -> None:
        """Capture all sizes, which ascend, largest first.

        run(n) launches a step of size n. It runs once before each capture, because libraries load and allocate at their
        first call, which is not allowed during a capture.
        """
        self._sizes = sizes
        self._graphs: dict[int, Graph] = {}
        if not sizes:
            return
        with closing(make_progress(len(sizes), work)) as progress:
            for size in reversed(sizes):
                run(size)
                device.synchronize()
                self._graphs[size] = device.capture(partial(run, size))
                progress.advance(1)

    def size_for(self, size: int) -> int | None:
        """Return the smallest graph size that is at least `size`; None if there is none."""
        index = bisect_left(self._sizes, size)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, size: int) -> None:
        self._graphs[size].replay()
