"""The emulator finds each bug of planted_bugs.cu, and nothing in the correct version of the same kernel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.backend.passes.cuda.device.launcher import Kernel, KernelFailed
from penstock.tools.gpu.cases import ptx_wrappers as wrappers
from tests.cuda_emulator import EmulatedLauncher
from tests.cuda_emulator.launcher import Mode, Order

if TYPE_CHECKING:
    from penstock.backend.passes.cuda.device.launcher import Argument

HERE = Path(__file__).parent
ORDERS: tuple[Order, ...] = ("forward", "reverse", "random")
NUM_THREADS = 64


def out(num_values: int = NUM_THREADS) -> torch.Tensor:
    return torch.zeros(num_values)


def integers(num_values: int = NUM_THREADS) -> torch.Tensor:
    return torch.zeros(num_values, dtype=torch.int32)


def inner() -> torch.Tensor:
    """Return the middle part of a tensor."""
    return torch.ones(3 * NUM_THREADS)[NUM_THREADS : 2 * NUM_THREADS]


class Planted:
    """A kernel of planted_bugs.cu, its launch, and a pattern of the error for its bug."""

    def __init__(
        self, entry: str, finding: str, *arguments: Argument, num_blocks: int = 1, shared_bytes: int = 0
    ) -> None:
        self.entry = entry
        self.finding = finding
        self.arguments = arguments
        self.num_blocks = num_blocks
        self.shared_bytes = shared_bytes

    def launch(self, launcher: EmulatedLauncher, bug: bool) -> list[torch.Tensor]:
        """Launch and return the tensor arguments; whole tensors are copied first, views are passed as they are."""
        kernel = Kernel("planted_bugs.cu", self.entry, (("BUG", int(bug)),), NUM_THREADS, self.shared_bytes)
        arguments = [fresh(argument) for argument in self.arguments]
        launcher.launch(kernel, (self.num_blocks, 1, 1), *arguments)
        return [argument for argument in arguments if isinstance(argument, torch.Tensor)]


def fresh(argument: Argument) -> Argument:
    whole = isinstance(argument, torch.Tensor) and argument._base is None
    return argument.clone() if isinstance(argument, torch.Tensor) and whole else argument


RACE = r"race \((read after write|write after read|write after write)\)"
UNCHECKED = [  # found in both modes
    Planted("divergent_barrier", r"divergent barrier: this thread is at planted_bugs.cu:\d+, others", out()),
    Planted("early_exit", r"barrier .*planted_bugs.cu:\d+", out()),
    Planted("lane_outside_its_mask", r"bad warp mask at .*: lane 31 calls, but is not in mask 7fffffff", out()),
    Planted("shuffle_from_outside_the_mask", r"bad shuffle mask at .*: lane 15 reads lane 16", out()),
    Planted("lanes_that_never_come", r"deadlock: .* for the lanes of mask ffffffff", out()),
    Planted("mismatched_masks", r"mismatched warp calls", out()),
    Planted("copy_not_awaited", r"cp.async not awaited", inner(), out(), shared_bytes=1024),
    Planted("misaligned_copy", r"misaligned cp.async", inner(), out(), shared_bytes=256),
    Planted("misaligned_matrix_row", r"misaligned ldmatrix", integers()),
    Planted("matrix_row_not_shared", r"out-of-bounds ldmatrix", integers(), integers()),
]
CHECKED = [
    *UNCHECKED,
    Planted("missing_barrier", RACE, out()),
    Planted("missing_trailing_barrier", RACE, inner(), out()),
    Planted("refilled_too_early", RACE + "|not awaited", inner(), out(), shared_bytes=512),
    Planted("missing_warp_barrier", RACE, out()),
    Planted("shuffle_taken_for_a_barrier", RACE, out()),
    Planted("warp_barrier_across_warps", RACE, out()),
    Planted("atomic_read_plainly", RACE, integers()),
    Planted("two_blocks_one_word", RACE + r".* of another block", integers(), num_blocks=2),
    Planted("missing_fence", RACE + r".* of another block", out(1 + 3 * 64), integers(1), num_blocks=3),
    Planted("written_after_the_fence", RACE + r".* of another block", out(4), integers(1), num_blocks=3),
    Planted("static_array_beyond", r"out-of-bounds", out(), np.int32(1)),
    Planted("static_pointer_beyond", r"of shared variable numbers, which has 256", out(), np.int32(1)),
    Planted("dynamic_shared_beyond", r"write .* at byte 256 of dynamic shared", out(), shared_bytes=256),
    Planted("global_read_beyond", r"at byte 256 of argument 0 \(in\), which has 256", inner(), out()),
    Planted("global_write_before", r"out-of-bounds write .* at byte -4 of argument 0 \(out\)", inner()),
    Planted("misaligned_vector", r"misaligned", inner(), out()),
    Planted("wait_too_weak", r"cp.async not awaited: access at planted_bugs.cu:\d+", inner(), out(), shared_bytes=1024),
    Planted("copy_read_without_barrier", RACE, inner(), out(), shared_bytes=1024),
    Planted("shared_not_initialised", r"uninitialised: read at planted_bugs.cu:\d+", out()),
    Planted("shared_kept_from_the_last_block", r"uninitialised", out(3 * NUM_THREADS), num_blocks=3),
    Planted("const_written", r"write at .* to argument 0 \(in\), which the kernel takes as const", inner(), out()),
    Planted("shift_too_far", r"shift out of range", integers(), np.int32(32)),
    Planted("sum_too_large", r"overflow of a signed sum", integers(), np.int32(2**30), np.int32(2**30)),
]  # fmt: skip


def launcher(mode: Mode, order: Order) -> EmulatedLauncher:
    return EmulatedLauncher(mode, order, kernels_dir=HERE)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("planted", CHECKED, ids=lambda planted: planted.entry)
def test_the_checking_mode_finds_the_bug(planted: Planted, order: Order) -> None:
    with pytest.raises(KernelFailed, match=planted.finding):
        planted.launch(launcher("check", order), bug=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("planted", UNCHECKED, ids=lambda planted: planted.entry)
def test_the_fast_mode_finds_control_flow_bugs(planted: Planted, order: Order) -> None:
    with pytest.raises(KernelFailed, match=planted.finding):
        planted.launch(launcher("fast", order), bug=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", ["fast", "check"])
@pytest.mark.parametrize("planted", CHECKED, ids=lambda planted: planted.entry)
def test_nothing_is_found_in_the_correct_version(planted: Planted, mode: Mode, order: Order) -> None:
    planted.launch(launcher(mode, order), bug=False)


EARLY = {  # entry → finding
    "input_read_too_early": r"read at planted_bugs.cu:\d+ of argument 1 \(in\) before the wait for earlier kernels",
    "input_copied_too_early": r"read at (ptx.cuh:\d+ in )?planted_bugs.cu:\d+ of argument 1 \(in\) before the wait",
    "written_too_early": r"write at planted_bugs.cu:\d+ to argument 2 \(out\) before the wait for earlier kernels",
    "ended_without_a_wait": r"this thread ends without a wait for earlier kernels",
}
BEFORE = Kernel("planted_bugs.cu", "global_read_beyond", (("BUG", 0),), NUM_THREADS)


def early(entry: str, *, bug: bool) -> Kernel:
    return Kernel("planted_bugs.cu", entry, (("BUG", int(bug)),), NUM_THREADS, is_dependent=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("entry", EARLY)
def test_a_kernel_that_begins_early_uses_nothing_of_the_kernel_before_it(entry: str, order: Order) -> None:
    emulated, weights, produced, result = launcher("check", order), torch.ones(NUM_THREADS), out(), out()
    emulated.launch(BEFORE, (1, 1, 1), torch.ones(NUM_THREADS), produced)
    emulated.launch(early(entry, bug=False), (1, 1, 1), weights, produced, result)
    assert result.equal(torch.ones(NUM_THREADS))
    with pytest.raises(KernelFailed, match=EARLY[entry]):
        emulated.launch(early(entry, bug=True), (1, 1, 1), weights, produced, out())


def test_a_kernel_that_begins_early_may_use_nothing_that_an_unfinished_kernel_writes() -> None:
    emulated, weights, first, second = launcher("check", "forward"), torch.ones(NUM_THREADS), out(), out()
    reads_early = early("input_read_too_early", bug=True)
    emulated.launch(BEFORE, (1, 1, 1), weights, first)
    emulated.launch(early("input_read_too_early", bug=False), (1, 1, 1), weights, first, second)
    with pytest.raises(KernelFailed, match=r"of argument 1 \(in\) before the wait"):
        emulated.launch(reads_early, (1, 1, 1), weights, first, out())
    emulated.launch(BEFORE, (1, 1, 1), second, out())  # begins when all others have ended
    emulated.launch(reads_early, (1, 1, 1), weights, first, out())


@pytest.mark.parametrize(("order", "arrived"), [("forward", False), ("reverse", True)])
def test_a_copy_lands_at_the_latest_or_the_earliest_moment(order: Order, arrived: bool) -> None:
    planted = Planted("wait_too_weak", "", inner(), out(), shared_bytes=1024)
    result = planted.launch(launcher("fast", order), bug=True)[1]
    assert result.equal(torch.ones(NUM_THREADS)) if arrived else result.isnan().any()


def test_a_missing_barrier_changes_the_result_with_the_order() -> None:
    planted = Planted("missing_barrier", "", out())
    results = [planted.launch(launcher("fast", order), bug=True)[0] for order in ORDERS]
    assert not all(result.equal(results[0]) for result in results)


def test_a_race_report_has_both_source_lines_and_the_macros() -> None:
    planted = next(planted for planted in CHECKED if planted.entry == "missing_barrier")
    with pytest.raises(KernelFailed) as failure:
        planted.launch(launcher("check", "forward"), bug=True)
    source = (HERE / "planted_bugs.cu").read_text().splitlines()
    read = 1 + source.index("    out[threadIdx.x] = numbers[63 - threadIdx.x];")
    message = str(failure.value)
    assert message.startswith(
        "missing_barrier[BUG=1], grid (1, 1, 1) of 64 threads: block (0,0,0) thread (0,0,0): race"
    )
    assert f"planted_bugs.cu:{read}" in message
    assert f"planted_bugs.cu:{read - 2}" in message
    assert "shared variable numbers" in message


COPY = Kernel("planted_bugs.cu", "global_read_beyond", (("BUG", 0),), NUM_THREADS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((inner(),), r"the kernel takes 2 arguments, not 1"),
        ((inner(), out(), np.int32(1)), r"the kernel takes 2 arguments, not 3"),
        ((inner(), np.int64(5)), r"argument 1 \(out\): the kernel takes a pointer of 8 bytes, given a integer of 8"),
        ((inner().bfloat16(), out()), r"argument 0 \(in\): .* to a float of 4 bytes, given one .* of 2"),
        ((inner().int(), out()), r"argument 0 \(in\): .* to a float of 4 bytes, given one to a integer of 4"),
        ((inner(), 3.0), r"a kernel takes no argument of type float"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(arguments: tuple[Argument, ...], message: str) -> None:
    with pytest.raises(KernelFailed, match=message):
        launcher("fast", "forward").launch(COPY, (1, 1, 1), *arguments)


@pytest.mark.parametrize("value", [np.int64(1), np.float32(1)])
def test_a_scalar_of_the_wrong_type_is_refused(value: np.int64 | np.float32) -> None:
    kernel = Kernel("planted_bugs.cu", "shift_too_far", (("BUG", 0),), NUM_THREADS)
    with pytest.raises(KernelFailed, match=r"argument 1 \(shift\): the kernel takes a integer of 4 bytes"):
        launcher("fast", "forward").launch(kernel, (1, 1, 1), integers(), value)


def test_a_launch_beyond_gpu_limits_is_refused() -> None:
    emulated = launcher("fast", "forward")
    for kernel, grid, message in (
        (Kernel(COPY.source, COPY.entry, COPY.macros, 1025), (1, 1, 1), "a block of 1025 threads"),
        (Kernel(COPY.source, COPY.entry, COPY.macros, 64, 240_000), (1, 1, 1), "bytes of shared memory, of which"),
        (COPY, (1, 65536, 1), "a grid beyond"),
    ):  # fmt: skip
        with pytest.raises(KernelFailed, match=message):
            emulated.launch(kernel, grid, inner(), out())


def test_a_launch_beyond_launch_bounds_is_refused() -> None:
    kernel = wrappers.wrapper_kernel("multiply", 64)
    with pytest.raises(KernelFailed, match="a block of 64 threads, but __launch_bounds__ allows 32"):
        launcher("fast", "forward").launch(kernel, (1, 1, 1))


def test_an_empty_grid_launches_nothing() -> None:
    target = out()
    launcher("fast", "forward").launch(COPY, (0, 1, 1), inner(), target)
    assert not target.any()


def test_a_missing_or_uncompilable_kernel_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken(float* x) { x[0] = nothing; }\n')
    broken = Kernel("broken.cu", "broken", (("SIZE", 3),), 32)
    emulated = EmulatedLauncher(kernels_dir=tmp_path)
    with pytest.raises(KernelFailed, match=r"broken.cu:1:.*nothing"):
        emulated.prepare([broken])
    with pytest.raises(KernelFailed, match="has no such kernel"):
        launcher("fast", "forward").launch(Kernel(COPY.source, "absent", COPY.macros, 32), (1, 1, 1))
