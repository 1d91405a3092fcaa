"""An `EmulatedDevice` that works as late as a GPU may: only when a thread waits for an event after the work.

Host memory that is written before the device has read it, or read before the device has written it, then has the wrong
step's numbers.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from tests.backend.passes.cuda.emulated_device import EmulatedDevice, RecordingMode
from tests.backend.passes.cuda.recorded_calls import RecordedGraph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from penstock.backend.forward_pass import PassOptions, StepBatch, TokenMasks
    from penstock.backend.passes.cuda.device.device import Event
    from penstock.backend.passes.cuda.step.step_results import PendingTokens


@dataclass
class DeferredGraph(RecordedGraph):
    queue: list[Callable[[], object]] = field(default_factory=list)

    def replay(self) -> None:
        self.num_replays += 1
        self.queue += self.calls


@dataclass(frozen=True)
class DeferredEvent:
    device: DeferredDevice
    num_calls: int

    def synchronize(self) -> None:
        self.device.run(self.num_calls)


@dataclass
class DeferredDevice(EmulatedDevice):
    queue: list[Callable[[], object]] = field(default_factory=list)
    num_run: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        with self._recording(self.queue), RecordingMode(self.queue):
            yield

    def run(self, num_calls: int) -> None:
        """Run the first num_calls of the queue on the calling thread."""
        with self.lock, _disable_current_modes(), torch.inference_mode():
            while self.num_run < num_calls:
                self.queue[self.num_run]()
                self.num_run += 1

    def pinned(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        with _disable_current_modes():  # host memory is not deferred; steps far ahead allocate more of it
            return super().pinned(num_elements, dtype)

    def record(self, done: Event | None = None) -> DeferredEvent:  # type: ignore[override]
        return DeferredEvent(self, len(self.queue))

    def capture(self, work: Callable[[], None]) -> DeferredGraph:
        graph = DeferredGraph(super().capture(work).calls, work, queue=self.queue)
        self.graphs[-1] = graph
        return graph

    def synchronize(self) -> None:
        self.run(len(self.queue))


class DeferredCudaPass(CudaDecoderPass):
    """Each pass has its own `device`. Loading and the warm-up are not deferred."""

    device: DeferredDevice

    @classmethod
    def load(cls, model_dir: Path, options: PassOptions) -> DeferredCudaPass:  # type: ignore[override]
        device = DeferredDevice()
        loaded = super().load(model_dir, options, device)
        assert isinstance(loaded, cls)
        loaded.device = device
        return loaded

    def save_pages(self, pairs: tuple[tuple[int, int], ...]) -> None:
        with self.device.deferring():
            super().save_pages(pairs)

    def forward(self, batch: StepBatch) -> Tensor:
        with self.device.deferring():
            return super().forward(batch)

    def sample(self, logits: Tensor, batch: StepBatch, masks: TokenMasks | None = None) -> PendingTokens:
        with self.device.deferring():
            return super().sample(logits, batch, masks)
