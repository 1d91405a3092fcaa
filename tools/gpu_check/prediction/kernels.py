"""Predicts the time of each kernel, in microseconds of its own running time, without the gap to the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backend.passes.decoder.cuda.attention.decode_chunks import NUM_WARPS, chunk_tokens, tile_tokens
from penstock.backend.passes.decoder.cuda.attention.segment_positions import ENOUGH_BLOCKS, longest_segment
from penstock.backend.passes.decoder.cuda.device.kernel_choices import CONSTANTS
from penstock.tools.gpu_check.machine_code.kernel_rows import KernelRow, read_table
from penstock.tools.gpu_check.prediction.machine import (
    ENDS_US,
    GEMM_SHARE,
    GEMV_SHARE,
    ISSUE_SHARE,
    MMA_SYNC_SHARE,
    ROW_PRODUCT_SHARE,
    STREAM_SHARE,
    WARP_IPC,
    WGMMA_SHARE,
    together,
)

if TYPE_CHECKING:
    from penstock.tools.gpu_check.prediction.machine import Machine

KV_NUMBER = {"fp32": 0, "bf16": 1, "q8_0": 2, "fp8": 3}
"""Values of the macro KV_DTYPE."""
KV_BYTES = {"fp32": 4.0, "bf16": 2.0, "q8_0": 34 / 32, "fp8": 1.0}
"""Bytes of a key's or value's number, scales included."""
_PREFILL_MATRIX = 256
"""Matrix instructions of a warp for 32 queries and 64 keys in heads of 128."""
_WGMMA_ROWS, _WGMMA_TOKENS = 16, 128
"""Rows and tokens of a warp's tile of prefill attention with wgmma."""
_WGMMA_TAKEN = 0.55
"""Share of the longest way through that tile's loop that a tile without a cap and a mask takes."""
_SAMPLED_AT_ONCE = 512
"""Logits of a warp in a turn of the sampler's loops."""
_DRAWN_TAKEN, _SCANNED_TAKEN, _LISTED_TAKEN = 0.17, 0.037, 0.09
"""Shares of the longest way through such a loop that a row without penalties, biases and masks takes.

In order: where a token is drawn, where only the largest logits are sought, and where few tokens are listed. Counted in
the listings.
"""
_FILTER_PASSES, _FILTER_PASS_US = 11, 1.15
"""Passes over a row's list with all filters, and the time of each. A pass reads the list, adds to a histogram and waits
at barriers."""


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128


@dataclass(frozen=True)
class KernelTimes:
    """Times on one machine, with the machine code of docs/gpu."""

    machine: Machine
    rows: dict[str, KernelRow]

    def decode_attention(self, heads: Heads, num_rows: int, num_tokens: int, kv_dtype: str) -> float:
        """The longest of: the bytes, the issued instructions, and one block's chain of chunks; with the merge."""
        machine = self.machine
        row = self._row("decode_attention", kv_dtype)
        num_bytes = num_rows * num_tokens * 2 * heads.num_kv_heads * heads.head_dim * KV_BYTES[kv_dtype]
        chunk = chunk_tokens(num_tokens, heads.num_kv_heads, CONSTANTS.chunk_tokens)
        chunks = -(-num_tokens // chunk)
        tiles = num_rows * heads.num_kv_heads * -(-num_tokens // tile_tokens(kv_dtype))
        issue_us = tiles * row.tile_instructions / (machine.issue_rate * ISSUE_SHARE) * 1e6
        blocks = num_rows * heads.num_kv_heads * chunks
        waves = -(-blocks // (machine.num_sms * row.blocks_per_sm))
        tiles_of_warp = -(-min(chunk, num_tokens) // (tile_tokens(kv_dtype) * NUM_WARPS))
        ipc = WARP_IPC if blocks > machine.num_sms else 1.2 * WARP_IPC
        chain_us = waves * tiles_of_warp * row.tile_instructions / (ipc * machine.clock_hz) * 1e6
        merge_us = 1.0 if chunks > 1 else 0.0
        stream_us = num_bytes / (machine.bandwidth * STREAM_SHARE) * 1e6
        return ENDS_US + 2 * machine.read_latency_us + merge_us + together(stream_us, issue_us, chain_us)

    def prefill_attention(
        self, heads: Heads, history: int, num_tokens: int, kv_dtype: str, *, wgmma: bool = True
    ) -> float:
        """The longer of the products' rate and the issued instructions, over whole waves of blocks. wgmma: multiply a
        bf16 cache with warpgroups; other caches use mma.sync."""
        machine = self.machine
        pairs = num_tokens * history + num_tokens * (num_tokens + 1) / 2
        if wgmma and kv_dtype == "bf16":
            row = self._row("prefill_attention_wgmma", kv_dtype)
            pairs += num_tokens * _WGMMA_TOKENS / 2  # on the diagonal
            flop = 4 * pairs * heads.num_heads * heads.head_dim
            warp_tiles = flop / (4 * _WGMMA_ROWS * _WGMMA_TOKENS * heads.head_dim)
            instructions, share = _WGMMA_TAKEN * row.tile_instructions, WGMMA_SHARE
        else:
            row = self._row("prefill_attention", kv_dtype)
            flop = 4 * pairs * heads.num_heads * heads.head_dim
            warp_tiles = flop / (_PREFILL_MATRIX * 4096)
            # The table counts an inner loop once; it runs until all matrix instructions of a tile are done.
            instructions = row.tile_instructions * max(1.0, 0.7 * _PREFILL_MATRIX / max(row.tile_matrix, 1))
            share = MMA_SYNC_SHARE
        issue_us = warp_tiles * instructions / (machine.issue_rate * ISSUE_SHARE) * 1e6
        mma_us = flop / (machine.products * share) * 1e6
        blocks, context = -(-num_tokens * heads.num_heads // 128), history + num_tokens
        # A short chunk leaves multiprocessors idle, until the block of the longest segment has ended.
        longest = longest_segment(context) if blocks < ENOUGH_BLOCKS else context
        idle = max(1.0, machine.num_sms / blocks * longest / context)
        return ENDS_US + 2 * machine.read_latency_us + idle * together(issue_us, mma_us)

    def product(self, num_rows: int, outputs: int, inputs: int) -> float:
        """Time of cuBLAS's bf16 product."""
        num_bytes = 2 * (outputs * inputs + num_rows * (outputs + inputs))
        flop = 2 * max(num_rows, 16) * outputs * inputs
        stream_us = num_bytes / (self.machine.bandwidth * GEMV_SHARE) * 1e6
        return ENDS_US + together(stream_us, flop / (self.machine.products * GEMM_SHARE) * 1e6)

    def row_product(self, num_rows: int, outputs: int, inputs: int) -> float:
        """Time of our product of at most 32 rows, including the operations before and after it.

        Blocks read the rows from L2, as many bytes as of weights at 32 rows.
        """
        num_bytes = 2 * (outputs * inputs * (1 + 0.2 * num_rows / 32) + num_rows * (outputs + inputs))
        stream_us = num_bytes / (self.machine.bandwidth * ROW_PRODUCT_SHARE) * 1e6
        return ENDS_US / 2 + stream_us

    def elementwise(self, num_bytes: float) -> float:
        """Time of a norm, a rotary embedding with the store, or an activation, of few rows or many."""
        return ENDS_US + self.machine.read_latency_us + num_bytes / (self.machine.bandwidth * STREAM_SHARE) * 1e6

    def sampling(self, num_rows: int, vocab_size: int, *, filtered: bool) -> float:
        """Reads bf16 logits once. With all filters, once more; then a block for each row works through its list."""
        launch_us = ENDS_US + self.machine.node_gap_us
        if not filtered:
            return launch_us + self._read_logits("scan_rows", _DRAWN_TAKEN, num_rows, vocab_size)
        scan_us = self._read_logits("scan_rows", _SCANNED_TAKEN, num_rows, vocab_size)
        list_us = self._read_logits("list_tokens", _LISTED_TAKEN, num_rows, vocab_size)
        waves = -(-num_rows // (self.machine.num_sms * self.rows["filter_rows[ACT=1]"].blocks_per_sm))
        return 3 * launch_us + scan_us + list_us + waves * _FILTER_PASSES * _FILTER_PASS_US

    def _read_logits(self, entry: str, taken: float, num_rows: int, vocab_size: int) -> float:
        read_us = num_rows * vocab_size * 2 / (self.machine.bandwidth * STREAM_SHARE) * 1e6
        instructions = num_rows * vocab_size / _SAMPLED_AT_ONCE * taken * self.rows[f"{entry}[ACT=1]"].tile_instructions
        return together(read_us, instructions / (self.machine.issue_rate * ISSUE_SHARE) * 1e6)

    def _row(self, entry: str, kv_dtype: str) -> KernelRow:
        prefix = f"{entry}[KV_DTYPE={KV_NUMBER[kv_dtype]} HEAD_DIM=128"
        return next(row for name, row in self.rows.items() if name.startswith(prefix))


def kernel_times(machine: Machine) -> KernelTimes:
    return KernelTimes(machine, read_table())
