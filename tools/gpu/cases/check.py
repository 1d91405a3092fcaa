"""A named check of a kernel, which the catalogues list, and the comparisons that checks make.

Comparisons raise `Mismatch` with a one-line message: unlike asserts they also run outside tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.backend.passes.cuda.device.launcher import Launcher


@dataclass(frozen=True)
class Check:
    """A named check. run raises Mismatch, or returns the measured error if there is one."""

    family: str
    name: str
    run: Callable[[Launcher], float | None]


def check_of(family: str, name: str, function: Callable[..., float | None], /, **arguments: Any) -> Check:
    """A check that calls a function of a launcher and these arguments."""
    return Check(family, name, partial(function, **arguments))


class Mismatch(Exception):
    """A kernel's result is wrong; the message says what differs and by how much."""


def require(what: str, holds: bool) -> None:
    if not holds:
        raise Mismatch(what)


def require_same_bits(what: str, found: Tensor, expected: Tensor) -> None:
    """Raise Mismatch unless all bytes are equal. NaNs with equal bits are equal."""
    x, y = (tensor.contiguous().view(torch.uint8) for tensor in (found, expected))
    if x.shape != y.shape or not torch.equal(x, y):
        count = int((x != y).sum()) if x.shape == y.shape else x.numel()
        raise Mismatch(f"{what}: {count} of {x.numel()} bytes differ")


def require_within(what: str, error: float, limit: float) -> float:
    """Return error if it is at most limit, else raise Mismatch. NaN always raises."""
    if not error <= limit:
        raise Mismatch(f"{what}: an error of {error:.3g}, at most {limit:.3g} is allowed")
    return error


def require_close(what: str, found: Tensor, expected: Tensor, rtol: float, atol: float) -> float:
    """Raise Mismatch unless |found - expected| ≤ atol + rtol · |expected|, or both are NaN, everywhere.

    Returns the largest difference as a share of the tolerance.
    """
    exact = expected.double()
    if found.shape != exact.shape:
        raise Mismatch(f"{what}: shape {tuple(found.shape)}, expected {tuple(exact.shape)}")
    if not found.numel():
        return 0.0
    same = (found.double() == exact) | (found.isnan() & exact.isnan())
    share = ((found.double() - exact).abs() / (atol + rtol * exact.abs())).nan_to_num(torch.inf)
    return require_within(f"{what}, as a share of the tolerance", float(share.masked_fill(same, 0).max()), 1.0)
