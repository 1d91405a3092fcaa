"""CudaDevice calls torch correctly; tested without a GPU."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, call

import pytest
import torch

from penstock.backend.forward_pass import DeviceLost
from penstock.backend.passes.cuda.device.cuda_device import CudaDevice, open_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator


class Pools:
    """torch's graphs and their memory pools. A pool whose last graph is gone, but whose memory is still in use, accepts
    no other graph (c10/cuda/CUDACachingAllocator.cpp, create_or_incref_pool)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[object] = []
        self.modes: list[str] = []
        self._num_made = 0
        self._used: set[object] = set()
        self.outlived: set[object] = set()
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.make)

    def make(self) -> int:
        self._num_made += 1
        return self._num_made

    @contextmanager
    def graph(
        self, _graph: object, pool: object = None, stream: object = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        pool = self.make() if pool is None else pool
        assert pool not in self.outlived, "use_count > 0 INTERNAL ASSERT FAILED"
        self._used.add(pool)
        self.streams.append(stream)
        self.modes.append(capture_error_mode)
        yield

    def end(self) -> None:
        """All graphs so far are gone, but memory of each pool is still in use."""
        self.outlived |= self._used


def test_graphs_can_be_captured_after_earlier_graphs_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    device, stream = _device(monkeypatch)
    done = []
    for step in range(2):
        device.capture(lambda step=step: done.append(step))
        pools.end()
    assert done == [0, 1]
    assert pools.streams == [stream, stream]
    assert pools.modes == ["thread_local", "thread_local"]


def test_a_device_that_fails_to_synchronize_is_lost_and_the_error_names_the_last_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, stream = _device(monkeypatch)
    device.check("a step of 3 tokens in 1 rows")
    assert stream.synchronize.call_count == 1
    stream.synchronize.side_effect = RuntimeError("CUDA error: an illegal memory access was encountered\nmore\n")
    with pytest.raises(DeviceLost) as caught:
        device.check("a step of 3 tokens in 1 rows")
    assert str(caught.value).startswith(
        "a step of 3 tokens in 1 rows: CUDA error: an illegal memory access was encountered; last launch: "
        "filter_rows[ACT=1] (1, 1, 1), "
    )


def test_an_event_blocks_without_spinning_and_waits_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device, stream = _device(monkeypatch, index=3)
    calls = Mock()
    monkeypatch.setattr(torch.cuda, "Event", calls.event)
    monkeypatch.setattr(torch.cuda, "set_device", calls.set_device)
    device.record().synchronize()
    assert calls.mock_calls == [
        call.event(blocking=True),
        call.event().record(stream),
        call.set_device(3),
        call.event().synchronize(),
    ]


def test_passes_of_a_thread_share_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second device would replace the stream in which torch works for the first."""
    _device(monkeypatch)
    opened = [open_gpu("cuda:0"), open_gpu("cuda:0"), open_gpu("cuda:1")]
    thread = threading.Thread(target=lambda: opened.append(open_gpu("cuda:0")))
    thread.start()
    thread.join()
    assert [opened.index(device) for device in opened] == [0, 0, 2, 3]


def _device(monkeypatch: pytest.MonkeyPatch, index: int = 0) -> tuple[CudaDevice, Any]:
    """Return a device and its stream."""

    class Properties:
        major, minor = 9, 0
        multi_processor_count = 132
        shared_memory_per_multiprocessor = 228 << 10

    stream = Mock()
    for name, value in (
        ("set_device", lambda _index: None),
        ("Stream", lambda: stream),
        ("set_stream", lambda _stream: None),
        ("get_device_properties", lambda _index: Properties),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    launcher = SimpleNamespace(last_launch="filter_rows[ACT=1] (1, 1, 1)")
    monkeypatch.setattr("penstock.backend.passes.cuda.device.cuda_device.CupyLauncher", lambda _index: launcher)
    return CudaDevice(index), stream
