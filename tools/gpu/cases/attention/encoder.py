"""Attention of encoders: packed rows of any length, whose qkv is NaN outside them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.backend.passes.cuda.attention.encoder_attention import DTYPES, EncoderAttention
from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.tools.gpu.cases.attention.paged_rows import STEEP_TOLERANCE
from penstock.tools.gpu.cases.attention.prefill import relative_error
from penstock.tools.gpu.cases.check import require_same_bits, require_within

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
_BEHIND = 70
"""Tokens after the rows, which belong to no row."""


@dataclass(frozen=True)
class EncoderCase:
    """A step of rows. Each row's numbers depend on its length and the seed alone."""

    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] = (1, 17, 130)
    window: int | None = None
    has_bias: bool = False
    num_heads: int = 2
    seed: int = 0
    is_steep: bool = False
    """The scores of a row go from about -200 to 200, so that nearly all of the softmax is one token's."""

    @property
    def attention(self) -> EncoderAttention:
        return EncoderAttention(self.num_heads, self.head_dim, self.dtype, self.head_dim**-0.5)

    def qkv(self) -> Tensor:
        rows = [_draw(self, length) for length in self.lengths]
        behind = torch.full((_BEHIND, *rows[0].shape[1:]), torch.nan)
        return torch.cat([*rows, behind]).to(self.dtype)

    def starts(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.cumsum([0, *self.lengths]).astype(np.int32)

    def biases(self) -> Tensor | None:
        if not self.has_bias:
            return None
        rng = np.random.default_rng(self.seed + 1)
        return torch.from_numpy(rng.standard_normal((self.num_heads, 2 * max(self.lengths) - 1))).float()


def run(case: EncoderCase, launcher: Launcher) -> Tensor:
    """[T, num_heads, head_dim]"""
    attention, qkv, starts = case.attention, case.qkv(), case.starts()
    out = torch.full((int(starts[-1]), case.num_heads, case.head_dim), torch.nan, dtype=case.dtype)
    attention.attend(
        launcher, qkv, torch.from_numpy(starts), torch.from_numpy(attention.tiles(starts)), out, window=case.window,
        biases=case.biases(),
    )  # fmt: skip
    return out


def expected(case: EncoderCase) -> Tensor:
    """[T, num_heads, head_dim] float64"""
    outputs, biases = [], case.biases()
    for row in torch.split(case.qkv()[:-_BEHIND].double(), list(case.lengths)):
        q, k, v = row.permute(1, 2, 0, 3)
        places = torch.arange(len(row))
        distance = places - places[:, None]
        scores = q @ k.transpose(1, 2) * case.head_dim**-0.5
        if biases is not None:
            scores = scores + biases.double()[:, distance + biases.shape[1] // 2]
        if case.window is not None:
            scores = scores.masked_fill(distance.abs() > case.window, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def check_attention(launcher: Launcher, case: EncoderCase) -> float:
    error = relative_error(run(case, launcher), expected(case))
    limit = STEEP_TOLERANCE[DTYPES[case.dtype]] if case.is_steep else TOLERANCE[case.dtype]
    return require_within("relative error of a token", error, limit)


def check_company(launcher: Launcher, dtype: torch.dtype) -> None:
    """A row has the same bits alone, and behind and before others."""
    alone = run(EncoderCase(dtype=dtype, lengths=(75,), window=30), launcher)
    together = run(EncoderCase(dtype=dtype, lengths=(1, 131, 75, 40), window=30), launcher)
    require_same_bits("a row beside others", together[132 : 132 + 75], alone)


def _draw(case: EncoderCase, length: int) -> Tensor:
    """[length, 3, num_heads, head_dim] fp32"""
    rng = np.random.default_rng((case.seed, length))
    numbers = torch.from_numpy(rng.standard_normal((length, 3, case.num_heads, case.head_dim))).float()
    numbers[:, 1] *= 2
    if case.is_steep:
        numbers[:, 0, :, 0] = 32.0
        numbers[:, 1, :, 0] = torch.linspace(-50, 50, length)[:, None].round()
    return numbers
