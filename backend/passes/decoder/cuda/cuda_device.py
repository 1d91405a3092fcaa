"""`Device` on a real GPU: torch.cuda for memory, streams and graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from backend.forward_pass import DeviceLost
from backend.passes.decoder.cuda.cupy_launcher import CupyLauncher

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class CudaDevice:
    """See `Device`. Belongs to the thread that makes it, whose current stream it sets."""

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", index)
        # Graphs cannot be captured on the default stream.
        self._stream = torch.cuda.Stream()
        torch.cuda.set_stream(self._stream)
        self.launcher = CupyLauncher(index)
        self._graph_pool = torch.cuda.graph_pool_handle()

    def pinned(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, pin_memory=True)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # On our own stream the products find the workspace that they were given outside the graph.
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=self._stream):
            work()
        return graph

    def synchronize(self) -> None:
        self._stream.synchronize()

    def judge(self, error: Exception, doing: str) -> Exception:
        try:
            self._stream.synchronize()
        except Exception as fault:  # noqa: BLE001 - whatever it is, a device that cannot be waited for computes no more
            return DeviceLost(
                f"{doing}: {fault}; the kernel given last was {self.launcher.last_launch}, the fault may be an earlier "
                f"one's: CUDA_LAUNCH_BLOCKING=1 names it"
            )
        return error
