"""Captured decode steps: their sizes, and operations that a capture forbids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.backend.passes.cuda.device.kernel_choices import KernelChoices
from penstock.backend.passes.decoder.cuda_pass import workspace_plan
from penstock.backend.passes.decoder.cuda_pass.cuda_graphs import StepGraphs, graph_sizes
from tests.backend.passes.cuda.emulated_device import EmulatedDevice
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.cuda.tiny_models import checkpoint, make_driver, options, prompts, run_prompts
from tests.backend.passes.decoder.driver import Driver


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (64, [1, 2, 4, *range(8, 65, 8)]),
        (300, [1, 2, 4, *range(8, 257, 8), 288, 300]),
        (4096, [1, 2, 4, *range(8, 257, 8), *range(288, 513, 32)]),
    ],
)
def test_sizes_go_up_to_the_largest_captured_step(max_rows: int, sizes: list[int]) -> None:
    assert graph_sizes(max_rows) == sizes


def test_a_step_is_padded_to_the_next_size_or_has_no_graph() -> None:
    graphs = StepGraphs(EmulatedDevice(), graph_sizes(20), lambda _num_rows: None)
    assert [graphs.size_for(n) for n in (1, 2, 3, 5, 16, 17, 20, 21)] == [1, 2, 4, 8, 16, 20, 20, None]


def test_each_size_runs_once_before_its_capture_largest_first() -> None:
    order: list[tuple[int, bool]] = []
    device = EmulatedDevice()
    StepGraphs(device, graph_sizes(4), lambda size: order.append((size, device.launcher.recorded is not None)))
    assert order == [(size, captured) for size in (4, 2, 1) for captured in (False, True)]


def test_a_replay_uses_the_current_contents_of_its_buffers() -> None:
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
def test_operations_that_a_capture_forbids_fail_on_the_emulated_device(work: object) -> None:
    with pytest.raises(AssertionError, match="allocates or waits"):
        EmulatedDevice().capture(work)  # type: ignore[arg-type]


def test_no_captured_step_prepares_a_kernel_or_waits() -> None:
    device = EmulatedDevice()
    for work in (device.synchronize, device.record):
        with pytest.raises(AssertionError, match="in a captured step"):
            device.capture(work)  # type: ignore[arg-type]


def test_captured_steps_of_all_sizes_have_the_same_kernels() -> None:
    driver = make_driver("qwen3")
    run_prompts(driver, prompts((3, 4)))
    # Two layers of 9 kernels: norm, qkv, RoPE and cache, attention, output, norm, gate and up, silu, down. Also the
    # step's plan, the embedding, the last norm, the logits, and the tokens.
    assert num_calls(driver.forward_pass._graphs) == {2 * 9 + 5}
    # Mixed steps have two kernels of attention, and end with the last layer's RoPE and cache.
    assert num_calls(driver.forward_pass._mixed_graphs._graphs) == {10 + 3 + 2}


def test_captured_steps_of_few_rows_in_bf16_have_five_kernels_a_layer() -> None:
    driver = make_driver("qwen3", "bf16", "bf16")
    # Beside the layers: the step's plan, the embedding, the first and the last norm, the logits, and the tokens.
    assert num_calls(driver.forward_pass._graphs) == {2 * 5 + 6}


@pytest.mark.parametrize(
    ("quantize", "calls"), [("none", {1: 2 * 5 + 6, 2: 2 * 5 + 6, 4: 2 * 9 + 5, 6: 2 * 9 + 5}), ("int8", None)]
)
def test_few_rows_are_as_many_as_was_chosen(
    monkeypatch: pytest.MonkeyPatch, quantize: str, calls: dict[int, int] | None
) -> None:
    """Quantised products have no library to leave more rows to."""
    chosen = KernelChoices(small_product_rows=2)
    monkeypatch.setattr(workspace_plan, "adopted_choices", lambda _device: (chosen, "for a test"))
    settings = replace(options("bf16"), quantize=quantize)
    driver = Driver(EmulatedCudaPass.load(checkpoint("qwen3"), settings), 32, 16, kv_dtype="bf16")
    graphs = driver.forward_pass._graphs._graphs
    found = {size: len(graph.calls) for size, graph in graphs.items()}
    assert found == (calls or dict.fromkeys((1, 2, 4, 6), 2 * 5 + 6))


def num_calls(graphs: StepGraphs) -> set[int]:
    """Return the numbers of kernels of all sizes."""
    return {len(graph.calls) for graph in graphs._graphs.values()}  # type: ignore[attr-defined]


def test_a_captured_step_that_uses_freed_memory_fails_when_it_runs() -> None:
    device = EmulatedDevice()
    x, kept = torch.arange(4.0), torch.zeros(4)
    graph = device.capture(lambda: kept.copy_(x))  # type: ignore[arg-type, return-value]
    graph.replay()
    x = torch.ones(4)  # the closure has the new tensor now
    with pytest.raises(AssertionError, match="memory that has been freed"):
        graph.replay()


def test_a_captured_step_that_uses_the_hosts_memory_is_refused() -> None:
    device = EmulatedDevice()
    staged, block = device.pinned(8, torch.int32), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(AssertionError, match="uses the host's memory"):
        device.capture(lambda: block.copy_(staged[:4]))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("changed", ["a number", "an address", "the kernels"])
def test_what_changes_after_the_capture_is_found(changed: str) -> None:
    device = EmulatedDevice()
    blocks, number = [torch.zeros(4), torch.zeros(4)], [1.0]
    device.capture(lambda: [block.fill_(number[0]) for block in blocks])  # type: ignore[arg-type, return-value]
    device.require_same_graphs()
    old = blocks[1]
    match changed:
        case "a number":
            number[0] = 2.0
        case "an address":
            blocks[1] = torch.zeros(4)
        case _:
            blocks.append(old)
    with pytest.raises(AssertionError, match="captured"):
        device.require_same_graphs()
