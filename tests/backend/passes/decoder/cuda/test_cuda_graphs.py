"""Captured decode steps: their sizes, and what a capture does not allow."""

from __future__ import annotations

import pytest
import torch

from penstock.backend.passes.decoder.cuda.cuda_graphs import DecodeGraphs, graph_sizes
from tests.backend.passes.decoder.cuda.emulated_device import EmulatedDevice
from tests.backend.passes.decoder.cuda.tiny_models import make_driver, prompts, run_prompts


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (64, [1, 2, 4, *range(8, 65, 8)]),
        (4096, [1, 2, 4, *range(8, 257, 8)]),
    ],
)
def test_sizes_go_up_to_the_most_rows_a_captured_step_has(max_rows: int, sizes: list[int]) -> None:
    assert graph_sizes(max_rows) == sizes


def test_a_step_is_padded_to_the_next_size_and_none_is_too_large_to_run() -> None:
    graphs = DecodeGraphs(EmulatedDevice(), 20, lambda _num_rows: None)
    assert [graphs.size_for(n) for n in (1, 2, 3, 5, 16, 17, 20, 21)] == [1, 2, 4, 8, 16, 20, 20, None]


def test_each_size_runs_once_before_it_is_captured_the_largest_first() -> None:
    order: list[tuple[int, bool]] = []
    device = EmulatedDevice()
    DecodeGraphs(device, 4, lambda size: order.append((size, device.launcher.recorded is not None)))
    assert order == [(size, captured) for size in (4, 2, 1) for captured in (False, True)]


def test_a_replay_does_what_was_captured_on_what_the_buffers_hold_now() -> None:
    device = EmulatedDevice()
    x, y = torch.arange(4.0), torch.zeros(2, 2)
    graph = device.capture(lambda: torch.mm(x.view(2, 2), x.view(2, 2), out=y))
    assert y.tolist() == [[0, 0], [0, 0]]
    x += 1
    graph.replay()
    assert y.tolist() == (x.view(2, 2) @ x.view(2, 2)).tolist()


@pytest.mark.parametrize(
    "work",
    [lambda: torch.zeros(3), lambda: torch.ones(2) @ torch.ones(2), lambda: torch.arange(3.0).sum().item()],
    ids=["an allocation", "a product into new memory", "waiting for a value"],
)
def test_what_a_capture_does_not_allow_fails_on_the_emulated_device_too(work: object) -> None:
    with pytest.raises(AssertionError, match="allocates or waits"):
        EmulatedDevice().capture(work)  # type: ignore[arg-type]


def test_no_captured_step_prepares_a_kernel_or_waits() -> None:
    device = EmulatedDevice()
    for work in (device.synchronize, device.record):
        with pytest.raises(AssertionError, match="in a captured step"):
            device.capture(work)  # type: ignore[arg-type]


def test_captured_steps_of_a_model_are_the_same_kernels_whatever_their_size() -> None:
    driver = make_driver("qwen3")
    run_prompts(driver, prompts((3, 4)))
    lengths = {len(graph.calls) for graph in driver.forward_pass.device.graphs}
    # Two layers of 9: a norm, qkv, RoPE and cache, attention, output, a norm, gate and up, silu, down; and the step's
    # plan and embedding, the last norm, and the logits.
    assert lengths == {2 * 9 + 4}
