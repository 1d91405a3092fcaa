"""Run the CUDA kernels' own source on the CPU, to test them without a GPU.

Each CUDA thread is a fiber that runs until it waits for others, at a barrier or in a warp operation. Inline PTX is
emulated by the CUSIM halves of common/ptx.cuh and hopper.cuh. In all modes, each block gets new shared memory full of
NaNs, subnormal floats are zero, and asynchronous copies and products of warpgroups take place as late as allowed (in
the reverse order, as early as allowed). All modes report, with the source line: divergent barriers, threads that end
before a barrier, bad shuffle masks, deadlocks, copies and products that are not awaited, registers of products without
a fence, arguments of the wrong number, size or element type, and launches beyond __launch_bounds__.

The mode "check" is about twenty times slower and sees every memory access. It also reports races within a block (only
barriers of the block, of a warp and in shared memory order accesses) and between blocks (only fences around atomics
do), stores that copies or products of warpgroups use without a fence, accesses outside an argument's bytes or the
block's shared memory, misaligned accesses, writes through pointers to const, reads of shared memory before it is
written, array indices, shifts and sums out of range, and in a launch that may begin before earlier kernels have ended,
uses of their memory before the wait for them.

The mode "device" rounds as a GPU may: it fuses products and sums, and approximations have the errors that the manuals
allow.

The emulator cannot find: differences between the two halves of ptx.cuh and hopper.cuh, which products a GPU compiler
fuses, weaker memory order than above, blocks that wait for each other, bank conflicts, and speed.
"""

from tests.cuda_emulator.launcher import EmulatedLauncher

__all__ = ["EmulatedLauncher"]
