"""Checkpoints with a head that predicts the token after the next one (MTP)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def add_head(model_dir: Path, *, seed: int = 0, copies: bool = False) -> Path:
    """Give a checkpoint a head with random weights, or one that does what a model of one layer does."""
    path = model_dir / "model.safetensors"
    tensors, rng = load_file(path), torch.Generator().manual_seed(seed)
    source = next(name for name in tensors if name.endswith("self_attn.q_proj.weight")).split("self_attn")[0]
    hidden = tensors["model.norm.weight"].shape[0]
    for name in [name for name in tensors if name.startswith(source)]:
        noise = 0.05 * torch.randn(tensors[name].shape, generator=rng)
        tensors[f"mtp.layers.0.{name.removeprefix(source)}"] = tensors[name] + (0 if copies else noise)
    fc = 0.1 * torch.randn((hidden, 2 * hidden), generator=rng)
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1) if copies else fc
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = 0.1 * torch.randn(hidden, generator=rng)
    if copies:  # embeddings of length 1, whose norm changes nothing: the head lacks only the first token
        rows = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = rows / rows.pow(2).mean(1, keepdim=True).sqrt()
        tensors["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden)
        tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    return model_dir
