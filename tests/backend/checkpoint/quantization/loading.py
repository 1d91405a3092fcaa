"""Loads quantised weights as the forward pass does, and compares them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.backend.checkpoint.config.tensors import LINEARS
from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.quantization.modes import QUANTIZATIONS
from penstock.backend.checkpoint.quantization.quantized_checkpoint import open_quantized
from penstock.backend.checkpoint.weight_forms.quantized_weights import Int4Weight, QuantizedWeight
from penstock.backend.dtypes import Dtype

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backend.checkpoint.files.progress import Work

Linears = dict[str, QuantizedWeight]


class Recorder:
    """Stands in for a progress bar."""

    def __init__(self, total_bytes: int, work: Work) -> None:
        self.total_bytes, self.work, self.done_bytes, self.closed = total_bytes, work, 0, 0

    def advance(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes

    def close(self) -> None:
        self.closed += 1


def load(model_dir: Path, mode: str = "int4") -> tuple[Linears, Recorder]:
    """All linears, read as the forward pass reads them."""
    config = read_decoder_config(model_dir)
    recorders: list[Recorder] = []

    def record(total_bytes: int, work: Work) -> Recorder:
        recorders.append(Recorder(total_bytes, work))
        return recorders[0]

    linears: Linears = {}
    with open_quantized(model_dir, config, QUANTIZATIONS[mode], record) as weights:
        embedding, head = weights.embedding(Dtype.BF16), weights.lm_head(Dtype.BF16)
        linears["lm_head"] = head if head is not None else embedding  # type: ignore[assignment]
        for i in range(config.num_layers):
            layer = weights.layer(i, Dtype.BF16)
            linears |= {f"{i}.{name}": weight for name in LINEARS if (weight := getattr(layer, name)) is not None}
        weights.final_norm(Dtype.BF16)
    assert recorders[0].closed == 1
    return linears, recorders[0]


def same(found: Linears, expected: Linears) -> bool:
    def equal(a: Any, b: Any) -> bool:
        parts = ("values", "scales", "zeros") if isinstance(a, Int4Weight) else ("values", "scales")
        return type(a) is type(b) and all(torch.equal(getattr(a, part), getattr(b, part)) for part in parts)

    return found.keys() == expected.keys() and all(equal(found[name], expected[name]) for name in found)
