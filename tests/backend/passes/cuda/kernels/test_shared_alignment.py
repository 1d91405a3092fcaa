"""Shared variables that are read as vectors declare that alignment: the compiler assumes it for the reads, but ptxas
places the variables by their declarations. The emulator's linker aligns more, so it would not find the error."""

from __future__ import annotations

import ctypes
import os
import re
from collections import defaultdict
from pathlib import Path

import pytest

from penstock.backend.passes.cuda.device import nvrtc
from penstock.backend.passes.cuda.device.launcher import KERNELS_DIR

_VARIABLE = re.compile(r"\.shared \.align (\d+) \.\w+ (\w+)")
_ACCESS = re.compile(r"\b(?:ld|st)\.shared\.(?:v([24])\.)?[a-z](\d+)\s[^;]*\[([%\w]+)")
_OPERATION = re.compile(r"\t[a-z][\w.]*\s+\t?(%\w+), ([^;]*);")
_NAME = re.compile(r"%?\w+")


def misaligned(ptx: str) -> set[str]:
    """Return shared variables that declare a smaller alignment than some access needs."""
    alignments = {name: int(alignment) for alignment, name in _VARIABLE.findall(ptx)}
    return {
        name
        for function in ptx.split(".entry")
        for name, num_bytes in accesses(function, set(alignments))
        if num_bytes > alignments[name]
    }


def accesses(function: str, variables: set[str]) -> set[tuple[str, int]]:
    """Return pairs of a variable and the bytes of an access whose address is derived from it."""
    made_of: defaultdict[str, set[str]] = defaultdict(set, {name: {name} for name in variables})
    operations = [(result, _NAME.findall(operands)) for result, operands in _OPERATION.findall(function)]
    is_new = True
    while is_new:
        is_new = False
        for result, operands in operations:
            found = set().union(*(made_of[name] for name in operands if name in made_of))
            if not found <= made_of[result]:
                made_of[result] |= found
                is_new = True
    return {
        (name, int(count or 1) * int(bits) // 8)
        for count, bits, base in _ACCESS.findall(function)
        for name in made_of[base]
    }


def compile_to_ptx(source: Path, *macros: str) -> str:
    library, program, size = nvrtc._library(), ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
    options = ["--std=c++17", f"-I{KERNELS_DIR}", "-arch=compute_90", *(f"-D{macro}" for macro in macros)]
    encoded = (ctypes.c_char_p * len(options))(*map(os.fsencode, options))
    assert library.nvrtcCompileProgram(program, len(options), encoded) == 0
    library.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(program, ptx)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx.value.decode()


@pytest.mark.parametrize(
    ("source", "macros", "widest"),
    [
        ("decode/decode_attention.cu", ("KV_DTYPE=0", "HEAD_DIM=64", "NUM_WARPS=4", "RING_TILES=4"), 16),
        ("decode/decode_attention.cu", ("KV_DTYPE=1", "HEAD_DIM=256", "NUM_WARPS=4", "RING_TILES=3"), 16),
        ("prefill/prefill_attention_fp32.cu", ("KV_DTYPE=0", "HEAD_DIM=64"), 16),
        ("products/expert_products.cu", ("ACT=1",), 16),
        ("sampling/sampling.cu", ("ACT=1",), 16),
        ("sampling/filters.cu", ("ACT=1",), 16),
        ("sampling/logprobs.cu", ("ACT=1",), 8),
    ],
)
def test_shared_variables_declare_the_alignment_of_their_vector_accesses(
    source: str, macros: tuple[str, ...], widest: int
) -> None:
    ptx = compile_to_ptx(KERNELS_DIR / source, *macros)
    assert misaligned(ptx) == set()
    variables = {name for _, name in _VARIABLE.findall(ptx)}
    assert max(size for function in ptx.split(".entry") for _, size in accesses(function, variables)) == widest


def test_an_under_aligned_array_is_found(tmp_path: Path) -> None:
    source = tmp_path / "planted.cu"
    source.write_text("""
        extern "C" __global__ void planted(float4* out, int n) {
            __shared__ float numbers[256];
            __shared__ float others[256];
            numbers[threadIdx.x] = others[threadIdx.x] = n;
            __syncthreads();
            out[threadIdx.x] = reinterpret_cast<float4*>(numbers)[(threadIdx.x + n) % 64];
            out[threadIdx.x].x += others[n];
        }
        """)
    (named,) = misaligned(compile_to_ptx(source))
    assert "numbers" in named
