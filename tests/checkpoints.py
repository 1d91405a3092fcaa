"""Tiny random checkpoints of every supported architecture, written by transformers, which is also the oracle.

    model_dir = make_checkpoint("qwen3", tmp_path, num_hidden_layers=4)

Every parameter is random, norms and biases included, so a forgotten one changes the result.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.presets import COMMON, PRESETS, VISION

if TYPE_CHECKING:
    from pathlib import Path


def make_config(architecture: str, **overrides: Any) -> Any:
    """The tiny transformers config of PRESETS[architecture], with overrides under transformers' names."""
    preset = PRESETS[architecture]
    # Copied, because transformers changes the dicts that it receives.
    settings = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in (COMMON | preset.settings | overrides).items()
    }
    if preset.text_config is None:
        return getattr(transformers, preset.config)(**settings)
    text = getattr(transformers, preset.text_config)(**settings)
    return getattr(transformers, preset.config)(
        text_config=text,
        vision_config=VISION | {"image_size": 32, "patch_size": 16},
        tie_word_embeddings=settings["tie_word_embeddings"],
    )


def make_model(architecture: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model in fp32 on the CPU with every parameter random, in eval mode."""
    preset, config = PRESETS[architecture], make_config(architecture, **overrides)
    model = getattr(transformers, preset.text_model or preset.model)(
        config if preset.text_model is None else config.text_config
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(noise * (0.2 if name.endswith("bias") else 0.15))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def make_checkpoint(
    architecture: str,
    out_dir: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write make_model's checkpoint to out_dir and return it. A small max_shard_size gives shards with an index."""
    model = make_model(architecture, seed, **overrides).to(dtype)
    model.save_pretrained(out_dir, max_shard_size=max_shard_size)
    if PRESETS[architecture].text_model is not None:
        _put_into_whole(out_dir, PRESETS[architecture].model)
    return out_dir


def _put_into_whole(model_dir: Path, architecture: str) -> None:
    """Give a text model's checkpoint the names that it has as a part of architecture."""
    text = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": text}))
    for path in model_dir.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({name.replace("model.", "model.language_model.", 1): tensors[name] for name in tensors}, path)


def load_oracle(model_dir: Path) -> Any:
    """The transformers model of a checkpoint, in fp32 with eager attention."""
    values = json.loads((model_dir / "config.json").read_text())
    (name,) = values["architectures"]
    for preset in PRESETS.values():
        if preset.model == name and preset.text_model is not None and preset.text_config is not None:
            config = getattr(transformers, preset.text_config)(**values["text_config"], attn_implementation="eager")
            model = getattr(transformers, preset.text_model)(config)
            tensors = load_file(model_dir / "model.safetensors")
            plain = {name.replace("language_model.", ""): tensor for name, tensor in tensors.items()}
            model.load_state_dict(plain, strict=False)  # lm_head is the embedding
            return model.eval()
    model = getattr(transformers, name).from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    return model.eval()
