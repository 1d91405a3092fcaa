"""Products on AMX tiles: the emulated ones have the documented results, and the CPU's the same bits as those."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.passes.cpu.library.native_library import request_tiles
from tests.backend.passes.conftest import MakeOps, make_amx_ops, make_tile_ops
from tests.backend.passes.cpu.ops_harness import BASE, BF16, OpsHarness


def multiply(make: MakeOps, x: Tensor, weight: Tensor) -> NDArray[np.float32]:
    harness = OpsHarness(make(replace(BASE, hidden_size=x.shape[1], vocab_size=len(weight)), BF16))
    harness.begin(len(x))
    packed = harness.ops.pack_linear(weight, None)
    product: NDArray[np.float32] = harness.ops.logits(harness.put("_hidden", x), packed).copy()
    harness.ops.close()
    return product


def bits_of(x: NDArray[np.float32]) -> NDArray[np.int32]:
    """All NaN are equal: AMX does not document which NaN comes out of several."""
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.int32)


def random_bf16(rng: np.random.Generator, shape: tuple[int, int], exponents: range, special: float = 0.0) -> Tensor:
    """Random numbers ± 1.xxxxxxx × 2^(exponent - 127); a share of them infinite or NaN."""
    exponent = rng.integers(exponents.start, exponents.stop, shape)
    exponent[rng.random(shape) < special] = 255
    mantissa = rng.integers(0, 128, shape) * (rng.random(shape) < 0.7)
    bits = rng.integers(0, 2, shape) << 15 | exponent << 7 | mantissa
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(BF16)


# Denormal numbers have the exponent 0. Products of two numbers near 2^-63 are near the smallest normal one.
VALUES = {
    "ordinary": (range(120, 131), 0.0),
    "denormal operands": (range(3), 0.0),
    "denormal products": (range(58, 67), 0.0),
    "overflowing": (range(186, 193), 0.0),
    "not finite": (range(120, 131), 0.003),
    "any": (range(256), 0.0),
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("inputs", [2, 30, 32, 34, 96, 258, 584])
def test_hardware_has_the_same_bits_as_emulated_tiles(inputs: int, values: str) -> None:
    """With inputs that do not fill the last tile, and more than are multiplied at once."""
    rng = np.random.default_rng(inputs)
    exponents, special = VALUES[values]
    x, weight = (random_bf16(rng, (n, inputs), exponents, special) for n in (40, 100))
    for num_rows in range(1, 41):
        found, expected = (multiply(make, x[:num_rows], weight) for make in (make_amx_ops, make_tile_ops))
        np.testing.assert_array_equal(bits_of(found), bits_of(expected))


def multiply_as_documented(x: Tensor, weight: Tensor) -> NDArray[np.float32]:
    """TDPBF16PS over tiles of 16 pairs. float64 has no rounding here, so each sum is rounded once to float32."""
    inputs = -(-x.shape[1] // 32) * 32
    a, b = (np.pad(m.double().numpy(), ((0, 0), (0, inputs - m.shape[1]))) for m in (x, weight))
    total = np.zeros((len(a), len(b)), np.float32)
    for tile in range(0, inputs, 32):
        sums = np.zeros((2, len(a), len(b)), np.float32)
        for k in range(tile, tile + 32):
            sums[k % 2] = sums[k % 2] + np.outer(a[:, k], b[:, k])
        total += sums[0] + sums[1]
    return total


@pytest.mark.parametrize("make", [make_amx_ops, make_tile_ops])
@pytest.mark.parametrize("inputs", [2, 30, 32, 96, 258, 584])
def test_tiles_add_in_the_documented_order(inputs: int, make: MakeOps) -> None:
    rng = np.random.default_rng(inputs)
    x, weight = (random_bf16(rng, (n, inputs), range(119, 135)) for n in (19, 70))
    np.testing.assert_array_equal(multiply(make, x, weight), multiply_as_documented(x, weight))


@pytest.mark.parametrize("make", [make_amx_ops, make_tile_ops])
def test_result_just_below_the_normal_numbers_becomes_zero(make: MakeOps) -> None:
    """2^-126 less a part of its last bit: zero, unless 24 bits round it up to 2^-126 again."""
    parts = torch.arange(16) / 16
    x = torch.tensor([[2.0**-63, 0, -(2.0**-76), 0]])
    weight = torch.stack([torch.full((16,), 2.0**-63), torch.zeros(16), (1 + parts) * 2.0**-75, torch.zeros(16)], dim=1)
    found = multiply(make, x.to(BF16), weight.to(BF16))[0]
    assert found.tolist() == [2.0**-126, *([0.0] * 15)]


class Library:
    """A library that the system answers with `error` when it asks for tiles; -1 if it has no tiles."""

    def __init__(self, error: int) -> None:
        self._error = error

    def ps_request_tiles(self) -> int:
        return self._error


@pytest.mark.parametrize(("error", "is_granted", "warnings"), [(0, True, 0), (-1, False, 0), (errno.EPERM, False, 1)])
def test_only_a_refusal_is_logged_and_only_once(
    error: int, is_granted: bool, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    library: Any = Library(error)
    with caplog.at_level(logging.INFO):
        assert request_tiles(library) is request_tiles(library) is is_granted
    assert len(caplog.messages) == warnings
    assert all("Operation not permitted" in message for message in caplog.messages)


REFUSED = """
import ctypes, struct
import torch
from penstock.backend.passes.cpu.path_choice import load_kernels
from tests.backend.passes.conftest import make_native_ops
from tests.backend.passes.cpu.ops_harness import BASE, BF16, OpsHarness

# A filter of system calls in classic BPF: (operation, steps to skip if equal, if not, operand).
LOAD, COMPARE, RETURN = 0x20, 0x15, 0x06
steps = [
    (LOAD, 0, 0, 0),  # the number of the call
    (COMPARE, 0, 3, 158),  # arch_prctl
    (LOAD, 0, 0, 16),  # its first argument
    (COMPARE, 0, 1, 0x1023),  # ARCH_REQ_XCOMP_PERM
    (RETURN, 0, 0, 0x50000 | 1),  # fails with EPERM
    (RETURN, 0, 0, 0x7FFF0000),  # is allowed
]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP

assert load_kernels().path.name == "avx512_bf16"
harness = OpsHarness(make_native_ops(BASE, BF16))
harness.begin(3)
packed = harness.ops.pack_linear(torch.ones(100, 48), None)
print(harness.ops.logits(harness.put("_hidden", torch.ones(3, 48)), packed).tolist())
"""


def test_process_that_is_refused_tiles_multiplies_without_them() -> None:
    make_amx_ops(BASE, BF16).close()  # the machine has AMX, and the library is compiled
    result = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.strip() == str([[48.0] * 100] * 3), result.stderr
    assert "refuses AMX tiles to this process" in result.stderr
