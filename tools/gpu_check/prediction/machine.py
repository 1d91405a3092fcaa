"""The constants of a GPU that predictions start from, each with its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The constants of a GPU; by default an H200."""

    bandwidth: float = 4.3e12
    """Bytes per second of a large copy, read and written: measured on an H200 (4.8 by its data sheet)."""
    products: float = 790e12
    """Operations per second of a large bf16 product of random numbers: measured on an H200 (989 by its data sheet)."""
    num_sms: int = 132
    clock_hz: float = 1.755e9
    """Clock under load; the H200's maximum is 1.98e9."""
    node_gap_us: float = 1.3
    """Idle time between two kernels of a graph, measured by others on an H100; 1.2 in our report of one."""
    dependent_gap_us: float = 0.6
    """The same gap before a kernel that begins early (programmatic dependent launch): a guess."""
    launch_us: float = 25.0
    """Host time of a launch outside a graph, by Python: measured beside an H100, on an Intel server's CPU."""
    round_trip_us: float = 15.0
    """From the end of a step on the GPU to the host's knowledge of its tokens."""
    read_latency_us: float = 0.75
    shared_bytes_per_sm: int = 228 << 10

    @property
    def issue_rate(self) -> float:
        """Warp instructions per second: four schedulers in each multiprocessor, one each per cycle."""
        return self.num_sms * 4 * self.clock_hz


H200 = Machine()
H100 = Machine(bandwidth=3.0e12, products=798e12)
"""An H100 with HBM3. Both values were measured on one, by a copy and by a product of 8,192 random rows and columns."""
_BY_NAME = {"H200": H200, "H100": H100}


def machine_of(gpu: str) -> Machine | None:
    """The constants of a GPU, by the driver's name for it; None if they are unknown."""
    return next((machine for name, machine in _BY_NAME.items() if name in gpu), None)


# Shares of a limit that well-made kernels reach: published ones of other projects, expected ones of ours.
STREAM_SHARE = 0.92
"""Share of the bandwidth of a kernel that streams more than 100 MB (FlashAttention 3: 0.88 to 0.98 of 4.3 TB/s)."""
GEMV_SHARE = 0.88
"""Share of the bandwidth of cuBLAS's products of few rows."""
ROW_PRODUCT_SHARE = 0.90
"""Share of the bandwidth of our products of few rows: weights are loaded before the preceding kernel has ended."""
GEMM_SHARE = 0.92
"""Share of `Machine.products` of cuBLAS's products of many rows."""
ISSUE_SHARE = 0.75
"""Share of the issue slots of a loop of dependent instructions with two warps per scheduler."""
MMA_SYNC_SHARE = 0.62
"""Share of the tensor cores' rate of mma.sync instead of wgmma on Hopper."""
WGMMA_SHARE = 0.72
"""Share of the tensor cores' rate of attention with wgmma whose warpgroups take turns without a schedule.

FlashAttention 3 without its overlap of softmax and products reaches 570 TFLOP/s.
"""
WARP_IPC = 0.5
"""Instructions per cycle of a warp that is alone on its scheduler."""
ENDS_US = 1.5
"""Time from the first instruction to the first load, and from the last store to the end of the grid."""


def together(*times: float) -> float:
    """The time of overlapping work: near the longest part, and above it where two are close."""
    return float(sum(time**4 for time in times) ** 0.25)
