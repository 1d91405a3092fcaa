"""The static table reads listings, loops and occupancy correctly, and finds what a change makes worse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.backend.passes.cuda.device import nvrtc
from penstock.backend.passes.cuda.device.launcher import Kernel
from tests.backend.passes.cuda.kernels import kernel_rows, kernel_table, sass
from tests.backend.passes.cuda.kernels.kernel_rows import KernelRow, worse_in
from tests.backend.passes.cuda.kernels.kernel_table import blocks_per_sm, loads_in_flight

LISTING = """
.text.stream:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 EXIT ;
.L_x_0:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0040*/              @!P1 BRA `(.L_x_1) ;
        /*0050*/                   HMMA.16816.F32 R12, R4, R8, R12 ;
.L_x_2:
        /*0060*/                   FADD R0, R0, R12 ;
        /*0070*/              @!P2 BRA `(.L_x_2) ;
        /*0080*/                   BRX R20 -0x10                  (*"BRANCH_TARGETS .L_x_3,.L_x_1"*);
.L_x_3:
        /*0090*/                   HMMA.16816.F32 R16, R4, R8, R16 ;
.L_x_1:
        /*00a0*/                   VIADD R2, R2, 0x20 ;
        /*00b0*/              @!P3 BRA `(.L_x_0) ;
        /*00c0*/                   STG.E desc[UR4][R2.64], R12 ;
        /*00d0*/                   EXIT ;
.L_x_4:
        /*00e0*/                   BRA `(.L_x_4);
"""


def test_longest_way_through_a_loop_is_its_tile() -> None:
    function = sass.parse_listing(LISTING)["stream"]
    assert len(function.instructions) == 15
    tile = function.loop_of("HMMA")
    assert tile is not None
    assert [instruction.name for instruction in tile.path] == [
        "LDG", "LDG", "BRA", "HMMA", "FADD", "BRA", "BRX", "HMMA", "VIADD", "BRA",
    ]  # fmt: skip
    inner = function.loop_of("FADD")
    assert inner is not None
    assert len(inner.path) == 2
    assert function.loop_of("IMMA") is None


def test_loads_are_in_flight_until_one_of_their_registers_is_used() -> None:
    function = sass.parse_listing(LISTING)["stream"]
    assert loads_in_flight(function.instructions) == 2


@pytest.mark.skipif(sass.find_nvdisasm() is None, reason="nvdisasm is not installed")
def test_row_of_a_kernel_whose_loop_is_known(tmp_path: Path) -> None:
    (tmp_path / "sum.cu").write_text(
        """
        extern "C" __global__ void sum(const float4* in, float* out, int n) {
            __shared__ float totals[64];
            float total = 0;
            #pragma unroll 1
            for (int i = threadIdx.x; i < n; i += 256) {
                const float4 a = in[i], b = in[i + 64], c = in[i + 128];
                total += a.x * b.y + c.z;
            }
            totals[threadIdx.x] = total;
            __syncthreads();
            out[threadIdx.x] = totals[63 - threadIdx.x];
        }
        """
    )
    kernel = Kernel(str(tmp_path / "sum.cu"), "sum", (), 64, 16 << 10)
    (row,) = kernel_table.make_rows([nvrtc.compile_kernel(kernel, "sm_90a")])
    assert (row.loads_in_flight, row.tile_matrix, row.tile_indirect, row.local_accesses, row.spill_bytes) == (
        3,
        0,
        0,
        0,
        0,
    )
    assert row.shared_bytes == (16 << 10) + 256
    assert row.blocks_per_sm == 13  # by shared memory: 228 KB / 17.25 KB
    assert 5 <= row.tile_instructions <= 20
    assert row.matrix == "none"


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared_bytes", "blocks"),
    # Worked out by hand; limited by registers, shared memory, warps, blocks; the last does not fit.
    [
        ("sm_90a", 128, 181, 104_976, 2),
        ("sm_90a", 256, 48, 256, 5),
        ("sm_90a", 128, 255, 0, 2),
        ("sm_90a", 1024, 32, 0, 2),
        ("sm_90a", 32, 16, 0, 32),
        ("sm_80", 128, 32, 81_920, 2),
        ("sm_89", 256, 32, 0, 6),
        ("sm_89", 128, 32, 101_376, 1),
        ("sm_80", 1024, 255, 0, 0),
    ],
)
def test_blocks_of_a_multiprocessor(arch: str, threads: int, registers: int, shared_bytes: int, blocks: int) -> None:
    assert blocks_per_sm(arch, threads, registers, shared_bytes) == blocks


def test_table_survives_its_file(tmp_path: Path) -> None:
    rows = list(kernel_rows.read_table().values())
    kernel_rows.write_table(rows, tmp_path / "table.tsv")
    assert list(kernel_rows.read_table(tmp_path / "table.tsv").values()) == rows
    assert (tmp_path / "table.tsv").read_bytes() == kernel_rows.TABLE.read_bytes()


def test_worse_machine_code_is_named() -> None:
    held = KernelRow("k", 128, 100, 0, 0, 1000, 4, 900, 500, 64, 8, 0, "HMMA 64", 8)
    assert worse_in(held, held) == []
    assert worse_in(held, replace(held, registers=120, tile_instructions=509, loads_in_flight=9)) == []
    worse = replace(
        held, registers=200, blocks_per_sm=2, spill_bytes=8, local_accesses=2, tile_instructions=511, tile_matrix=32,
        tile_indirect=1, loads_in_flight=4,
    )  # fmt: skip
    assert worse_in(held, worse) == [
        "registers 100 → 200", "spill_bytes 0 → 8", "local_accesses 0 → 2", "blocks_per_sm 4 → 2",
        "tile_instructions 500 → 511", "tile_matrix 64 → 32", "tile_indirect 0 → 1", "loads_in_flight 8 → 4",
    ]  # fmt: skip
