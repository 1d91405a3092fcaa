"""Comparisons that raise `Mismatch`, in one line, instead of asserting: they run outside tests too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Mismatch(Exception):
    """A kernel computed something else than it should; the message says what, and by how much."""


def require(what: str, holds: bool) -> None:
    if not holds:
        raise Mismatch(what)


def require_same_bits(what: str, found: Tensor, expected: Tensor) -> None:
    """NaNs of equal bits are equal."""
    x, y = (tensor.contiguous().view(torch.uint8) for tensor in (found, expected))
    if x.shape != y.shape or not torch.equal(x, y):
        count = int((x != y).sum()) if x.shape == y.shape else x.numel()
        raise Mismatch(f"{what}: {count} of {x.numel()} bytes differ")


def require_within(what: str, error: float, limit: float) -> float:
    """Returns the error. A NaN is never within."""
    if not error <= limit:
        raise Mismatch(f"{what}: an error of {error:.3g}, at most {limit:.3g} is allowed")
    return error


def require_close(what: str, found: Tensor, expected: Tensor, rtol: float, atol: float) -> float:
    """|found - expected| ≤ atol + rtol · |expected| everywhere, or both are NaN; returns the largest
    difference as a share of what is allowed."""
    wanted = expected.double()
    if found.shape != wanted.shape:
        raise Mismatch(f"{what}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}")
    if not found.numel():
        return 0.0
    same = (found.double() == wanted) | (found.isnan() & wanted.isnan())
    share = ((found.double() - wanted).abs() / (atol + rtol * wanted.abs())).nan_to_num(torch.inf)
    return require_within(f"{what}, as a share of the tolerance", float(share.masked_fill(same, 0).max()), 1.0)
