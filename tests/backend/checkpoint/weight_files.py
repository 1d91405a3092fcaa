"""Opening and changing checkpoints on disk."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.weights import open_weights

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backend.checkpoint.weights import DecoderWeights


SHARDED = {"max_shard_size": "60KB"}
INDEX = "model.safetensors.index.json"


def open_checkpoint(model_dir: Path) -> DecoderWeights:
    return open_weights(model_dir, read_decoder_config(model_dir))


def rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a safetensors file; None removes one."""
    tensors: dict[str, Any] = {name: tensor.clone() for name, tensor in load_file(path).items()} | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def name_twice(path: Path, name: str) -> None:
    """Give a tensor of a safetensors file a second entry in the header, the same as the first."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    entry = json.dumps({name: json.loads(content[8:end])[name]}).encode()
    header = content[8:end].rstrip().removesuffix(b"}") + b"," + entry.removeprefix(b"{")
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
