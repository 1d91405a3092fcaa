"""Random LoRA adapters in the layout of peft, and their application by definition: the oracle of adapters.

    adapter_dir = make_adapter(model, tmp_path, rank=8)

Independent of the server's own reader: matrices come from safetensors, modules and shapes from transformers.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from torch import Tensor

PREFIX = "base_model.model."


def linears(model: Any, targets: Collection[str] | None = None) -> dict[str, nn.Linear]:
    """Name → linear of the model's layers; targets are last parts of names, None for all but experts and routers."""
    found = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        is_wanted = (
            last.endswith(("_proj", "c_fc")) or last.startswith("in_proj_") if targets is None else last in targets
        )
        if isinstance(module, nn.Linear) and ".layers." in name and ".experts." not in name and is_wanted:
            found[name] = module
    return found


def make_adapter(
    model: Any,
    out_dir: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 16.0,
    targets: Collection[str] | None = None,
    size: float = 0.15,
    **settings: Any,
) -> Path:
    """Write an adapter for a transformers model to out_dir and return it. settings are further keys of its config."""
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "task_type": "CAUSAL_LM"} | settings
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, linear in linears(model, targets).items():
        own_rank = config.get("rank_pattern", {}).get(name.rpartition(".")[2], rank)
        for part, shape in (("A", (own_rank, linear.in_features)), ("B", (linear.out_features, own_rank))):
            tensors[f"{PREFIX}{name}.lora_{part}.weight"] = size * torch.randn(shape, generator=generator)
    assert tensors, "the model has none of the targets"
    config["target_modules"] = sorted({name.rpartition(".")[2] for name in linears(model, targets)})
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, out_dir / "adapter_model.safetensors")
    return out_dir


def updates(adapter_dir: Path) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Module → A, B and the scale of their product. Patterns are last parts of names."""
    config = json.loads((adapter_dir / "adapter_config.json").read_text())
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    found = {}
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            last = module.rpartition(".")[2]
            rank = config.get("rank_pattern", {}).get(last, config["r"])
            alpha = config.get("alpha_pattern", {}).get(last, config["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            found[module] = down, tensors[name.replace("lora_A", "lora_B")], scale
    return found


def merge(model: Any, adapter_dir: Path) -> Any:
    """Add scale × B × A to the model's own weights, in place. Return the model."""
    with torch.no_grad():
        for name, (down, up, scale) in updates(adapter_dir).items():
            model.get_submodule(name).weight += scale * up @ down
    return model


def hook(model: Any, adapter_dir: Path) -> Any:
    """Add to the results of the model's linears, whatever these are. Return the model."""
    for name, (down, up, scale) in updates(adapter_dir).items():

        def add(
            _module: Any, inputs: tuple[Tensor], output: Tensor, down: Tensor = down, up: Tensor = scale * up
        ) -> Tensor:
            return output + inputs[0] @ down.T @ up.T

        model.get_submodule(name).register_forward_hook(add)
    return model
