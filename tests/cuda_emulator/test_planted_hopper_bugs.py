"""The emulator finds each bug of planted_hopper_bugs.cu, and nothing in the correct version of the same kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.backend.passes.cuda.device.launcher import Kernel, KernelFailed, TensorMap
from tests.cuda_emulator import EmulatedLauncher
from tests.cuda_emulator.launcher import Mode, Order

HERE = Path(__file__).parent
ORDERS: tuple[Order, ...] = ("forward", "reverse", "random")
NUM_THREADS, BOX_ROWS = 128, 64
SHARED_BYTES = 2 * BOX_ROWS * 128 + 4 * 8
NOT_AWAITED = r"copy of a box not awaited: access at|after the copy of a box|uninitialised: read"
RACE = r"race \((read after write|write after read|write after write)\)"

UNCHECKED = {  # entry → finding; found in all modes
    "too_many_bytes_announced": r"deadlock: 128 threads wait for others that never come",
    "too_many_arrivals": r"mbarrier.arrive at .*: all 1 arrivals of this phase have come|deadlock",
    "some_threads_meet_at_two_places": r"divergent barrier",
    "turn_not_passed_on": r"deadlock: 128 threads wait for others that never come",
    "registers_not_fenced": r"wgmma at .* without a wgmma.fence since the last wait",
    "too_many_registers": r"setmaxnreg: the block's threads have 65536 registers in all, of 64512",
    "product_never_awaited": r"wgmma not awaited",
    "part_of_a_warpgroup_multiplies": r"deadlock",
    "rows_not_at_1024": r"8 rows that do not begin at a multiple of 1024",
}
CHECKED = UNCHECKED | {
    "box_not_awaited": NOT_AWAITED,
    "awaited_by_another_thread": NOT_AWAITED,
    "turn_not_awaited": RACE + "|this thread arrives twice",
    "turn_passed_on_twice": RACE + "|this thread arrives twice",
    "wrong_phase": NOT_AWAITED,
    "barrier_not_fenced": r"missing fence at .*: copy of a box: the barrier was initialised without",
    "slot_filled_too_early": RACE + "|" + NOT_AWAITED + "|all 1 arrivals of this phase have come",
    "stored_without_a_fence": r"missing fence: asynchronous access .* without a fence.proxy.async",
    "operands_stored_without_a_fence": r"missing fence: asynchronous access .* without a fence.proxy.async",
    "released_during_a_product": RACE + "|" + NOT_AWAITED,
}
VALUES = ("accumulators_read_too_early", "wrong_distance_of_rows")
MATRIX = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def launch(entry: str, mode: Mode, order: Order, *, bug: bool) -> torch.Tensor:
    num_threads = 3 * NUM_THREADS if entry == "too_many_registers" else NUM_THREADS
    kernel = Kernel("planted_hopper_bugs.cu", entry, (("BUG", int(bug)),), num_threads, SHARED_BYTES, needs_wgmma=True)
    out = torch.zeros(NUM_THREADS)
    launcher = EmulatedLauncher(mode, order, seed=3, kernels_dir=HERE)
    launcher.launch(kernel, (1, 1, 1), TensorMap(MATRIX.view(torch.uint8).view(-1), 64, BOX_ROWS), out)
    return out


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("entry", CHECKED)
def test_the_checking_mode_finds_the_bug_and_nothing_without_it(entry: str, order: Order) -> None:
    launch(entry, "check", order, bug=False)
    with pytest.raises(KernelFailed, match=CHECKED[entry]):
        launch(entry, "check", order, bug=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("entry", UNCHECKED)
def test_the_fast_mode_finds_bugs_of_control_flow(entry: str, order: Order) -> None:
    launch(entry, "fast", order, bug=False)
    with pytest.raises(KernelFailed, match=UNCHECKED[entry]):
        launch(entry, "fast", order, bug=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("entry", VALUES)
def test_a_bug_of_values_changes_the_result(entry: str, order: Order) -> None:
    sound, wrong = (launch(entry, "fast", order, bug=bug) for bug in (False, True))
    assert torch.isfinite(sound).all()
    assert not torch.equal(sound, wrong)


def test_a_copy_arrives_only_when_a_thread_waits_for_it_and_in_the_reverse_order_at_once() -> None:
    awaited = launch("box_not_awaited", "fast", "forward", bug=False)
    with pytest.raises(KernelFailed, match=r"copy of a box not awaited: the block ends with 1 under way"):
        launch("box_not_awaited", "fast", "forward", bug=True)
    assert torch.equal(launch("box_not_awaited", "fast", "reverse", bug=True), awaited)
    with pytest.raises(KernelFailed, match=r"the block ends with 1 under way"):
        launch("block_ends_before_its_copy", "fast", "forward", bug=True)
