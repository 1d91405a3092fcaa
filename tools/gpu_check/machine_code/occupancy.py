"""Computes how many blocks a multiprocessor runs at once, from registers, shared memory and threads.

Limits: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

SHARED_BYTES_PER_SM = {"sm_80": 164 << 10, "sm_89": 100 << 10, "sm_90a": 228 << 10}
_WARPS_PER_SM = {"sm_80": 64, "sm_89": 48, "sm_90a": 64}
_BLOCKS_PER_SM = {"sm_80": 32, "sm_89": 24, "sm_90a": 32}
_REGISTERS_PER_SM = 65_536
_REGISTERS_UNIT = 256
"""Registers are given to a warp in multiples of this."""
_RESERVED_SHARED_BYTES = 1024
_SHARED_UNIT = 128


def blocks_per_sm(arch: str, num_threads: int, registers: int, shared_bytes: int) -> int:
    """0 if not even one block fits."""
    num_warps = -(-num_threads // 32)
    per_warp = -(-registers * 32 // _REGISTERS_UNIT) * _REGISTERS_UNIT
    # Each of the four schedulers has a quarter of the registers, and runs whole warps.
    warps_by_registers = _REGISTERS_PER_SM // 4 // max(per_warp, 1) * 4
    shared = -(-(shared_bytes + _RESERVED_SHARED_BYTES) // _SHARED_UNIT) * _SHARED_UNIT
    return min(
        _BLOCKS_PER_SM[arch],
        _WARPS_PER_SM[arch] // num_warps,
        warps_by_registers // num_warps,
        SHARED_BYTES_PER_SM[arch] // shared,
    )
