"""Adapters of a linear, checked against float64; tokens without one must keep their bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.backend.checkpoint.tensor_files.lora_weights import LoraWeights
from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.backend.passes.cuda.memory.lora import CudaAdapters
from penstock.backend.passes.cuda.ops.matmul import CudaLinear
from penstock.tools.gpu.cases.check import require_close, require_same_bits
from penstock.tools.gpu.cases.elementwise import DTYPES, TOLERANCE

_SCALE = 0.5
_PARTS: dict[int, tuple[tuple[int, int, int], ...]] = {0: ((0, 16, 3), (24, 16, 135)), 2: ((8, 1 << 30, 9),)}
"""Adapter → (first output, most outputs, rank) of its parts; warps take 128 ranks at a time. Adapter 1 has none."""
_ODD_PARTS = {0: ((0, 2, 3), (2, 2, 3)), 2: ((2, 2, 4),)}
"""Of 4 outputs."""
_TOKENS = (*[0] * 5, -1, 2, 1, 0, *[2] * 4, -1, -1, 1, 2)


@dataclass(frozen=True)
class AdaptersCase:
    dtype: torch.dtype
    inputs: int
    outputs: int
    out_dtype: torch.dtype
    """dtype, or fp32."""

    def make(self, launcher: Launcher) -> tuple[CudaAdapters, CudaLinear, dict[int, Tensor]]:
        """Return also what each adapter adds to the weights, float64 [outputs, inputs]."""
        adapters = CudaAdapters(launcher, torch.device("cpu"), self.dtype, len(_TOKENS), 1 << 20)
        adapters._memory.fill_(0xFF)
        adapters._ranks.fill_(torch.nan)
        weight = torch.zeros(self.outputs, self.inputs, dtype=self.dtype)
        linear = CudaLinear(weight, weight.t(), None, _SCALE)
        adapters.open([linear])
        generator, added = torch.Generator().manual_seed(self.inputs), {}
        for index, parts in (_PARTS if self.outputs % 8 == 0 else _ODD_PARTS).items():
            added[index], loras = torch.zeros(self.outputs, self.inputs, dtype=torch.float64), []
            for first, most, rank in parts:
                count = min(most, self.outputs - first)
                down, up = (
                    torch.randn(shape, generator=generator).to(self.dtype).float()
                    for shape in ((rank, self.inputs), (count, rank))
                )
                loras.append(LoraWeights(first, down, up))
                added[index][first : first + count] = _SCALE * up.double() @ down.double()
            adapters.put(linear, index, adapters.prepare(linear, loras))
        return adapters, linear, added

    def values(self) -> tuple[Tensor, Tensor]:
        """x and out."""
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(len(_TOKENS), self.inputs, generator=generator).to(self.dtype)
        return x, torch.randn(len(_TOKENS), self.outputs, generator=generator).to(self.out_dtype)


def check_adapters(launcher: Launcher, case: AdaptersCase) -> float:
    adapters, linear, added = case.make(launcher)
    tokens, (x, before) = torch.tensor(_TOKENS, dtype=torch.int32), case.values()
    found = before.clone()
    adapters.add(x, linear, found, tokens)
    kept = torch.tensor([index not in added for index in _TOKENS])
    require_same_bits("tokens without an adapter", found[kept], before[kept])
    expected = before.double()
    for index, weight in added.items():
        own = tokens == index
        expected[own] += x[own].double() @ weight.T
    tolerance = TOLERANCE[case.out_dtype]
    return require_close("the sums", found, expected, tolerance, tolerance * case.inputs**0.5)


def check_company(launcher: Launcher, case: AdaptersCase) -> None:
    """A token has the same bits alone, whatever group it is in here."""
    adapters, linear, _ = case.make(launcher)
    x, before = case.values()
    together = before.clone()
    adapters.add(x, linear, together, torch.tensor(_TOKENS, dtype=torch.int32))
    for token, index in enumerate(_TOKENS):
        alone = before[token : token + 1].clone()
        adapters.add(x[token : token + 1].clone(), linear, alone, torch.tensor([index], dtype=torch.int32))
        require_same_bits(f"token {token}", alone[0], together[token])


def cases() -> dict[str, AdaptersCase]:
    sizes = {"wide": (1160, 2056), "small": (40, 48)}
    found = {
        f"{name}.{kind}": AdaptersCase(dtype, *size, dtype)
        for name, size in sizes.items()
        for kind, dtype in DTYPES.items()
    }
    return found | {f"gates.{kind}": AdaptersCase(dtype, 72, 4, torch.float32) for kind, dtype in DTYPES.items()}
