"""Runs the CUDA kernels' own source on the CPU, so that they can be tested where there is no GPU.

Each CUDA thread is a fiber: it runs until it waits for others at a barrier or in a call of its warp. Inline PTX is
emulated (the CUSIM half of kernels/ptx.cuh). In all modes shared memory is new and full of NaNs in each block,
subnormal floats are zero, copies by cp.async land as late as they may (or as early, in the reverse order), and these
are named where they happen: divergent barriers, threads that end before one, bad shuffle masks, deadlocks, copies not
waited for, arguments of the wrong number, size or element type, launches beyond __launch_bounds__.

The checking mode, some twenty times slower, sees each access to memory. It names races within a block (only barriers of
block or warp order accesses) and between blocks (only fences around atomics do), accesses beyond an argument's exact
bytes or the block's shared memory, misaligned ones, writes through pointers to const, shared memory that is read before
it is written, array indices, shifts and sums out of range.

The mode "device" rounds as a GPU may: products and sums are fused, and approximations are off by what the manuals
allow.

What it cannot see: whether the asm half of ptx.cuh says what the other half does, which products a GPU's compiler
fuses, weak memory order beyond the above, blocks that wait for each other, bank conflicts and speed.
"""

from tests.cuda_emulator.launcher import EmulatedLauncher

__all__ = ["EmulatedLauncher"]
