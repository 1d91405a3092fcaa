"""A checkpoint's tensors, as llama.cpp's converter changes them before it writes them."""

from __future__ import annotations

from typing import Any

import torch


def stream_tensors(tensors: dict[str, torch.Tensor], vocab_size: int) -> dict[str, torch.Tensor]:
    """The tensors of Gemma 3n, as llama.cpp's converter writes them."""
    found = {f"{name}.weight" if name.endswith("_scale") else name: tensor for name, tensor in tensors.items()}
    for name in ("model.altup_projections", "model.altup_unembed_projections"):
        parts = [found.pop(part) for part in sorted(found) if part.startswith(f"{name}.")]
        found[f"{name}.weight"] = torch.stack(parts)
    found["model.layers.5.self_attn.k_proj.weight"] = found["model.layers.2.self_attn.k_proj.weight"]  # is not used
    table = "model.embed_tokens_per_layer.weight"
    found[table] = torch.nn.functional.pad(found[table], (0, 0, 0, vocab_size - len(found[table])))
    return found


def as_converted(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of gpt-oss, as llama.cpp's converter takes them apart: gate and up, outputs before inputs."""
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        base, _, part = name.rpartition(".experts.")
        if name.endswith("sinks"):
            converted[f"{name}.weight"] = tensor
        elif not base:
            converted[name] = tensor
        else:
            kind = "bias" if part.endswith("_bias") else "weight"
            outputs = tensor if kind == "bias" else tensor.transpose(1, 2)
            matrices = (
                {"gate_proj": outputs[:, ::2], "up_proj": outputs[:, 1::2]}
                if part.startswith("gate_up")
                else {"down_proj": outputs}
            )
            converted |= {f"{base}.experts.{part}.{kind}": matrix.contiguous() for part, matrix in matrices.items()}
    return converted


def hybrid_tensors(tensors: dict[str, torch.Tensor], config: Any, *, tiles_heads: bool) -> dict[str, torch.Tensor]:
    """The tensors of Qwen3-Next, or with tiles_heads of Qwen3.5, as llama.cpp's converter writes them."""
    num_keys, per_key = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    key_rows = 2 * num_keys * config.linear_key_head_dim

    def tiled(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        order = torch.arange(tensor.shape[dim]).view(num_keys, per_key, -1).transpose(0, 1).flatten()
        return tensor.index_select(dim, order) if tiles_heads else tensor

    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        part = name.rpartition("linear_attn.")[2]
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            rows = tensor.flatten(1)
            found[name] = torch.cat([rows[:key_rows], tiled(rows[key_rows:])])
        elif part == "in_proj_qkvz.weight":
            sizes = [config.linear_key_head_dim] * 2 + [per_key * config.linear_value_head_dim] * 2
            *qkv, gates = (rows.flatten(0, 1) for rows in tensor.view(num_keys, -1, tensor.shape[1]).split(sizes, 1))
            found[name.replace("qkvz", "qkv")] = torch.cat(qkv)
            found[name.replace("qkvz", "z")] = gates
        elif part == "A_log":
            found[name] = -tiled(tensor).exp()
        elif part == "dt_bias":
            found[name.replace("dt_bias", "dt_proj.bias")] = tiled(tensor)
        elif part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"):
            found[name] = tiled(tensor)
        elif part == "out_proj.weight":
            found[name] = tiled(tensor, 1)
        else:
            found[name] = tensor + 1 if name.endswith("norm.weight") and part == name else tensor
    return {name: tensor.contiguous() for name, tensor in found.items()}


def text_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The text model's tensors of a checkpoint that also reads images, with gate and up of experts apart."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        plain = name.replace("model.language_model.", "model.")
        base, _, part = plain.rpartition(".experts.")
        if part == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"{base}.experts.gate_proj.weight": gate, f"{base}.experts.up_proj.weight": up}
        elif "visual." not in plain:
            found[f"{plain}.weight" if base else plain] = tensor.contiguous()
    return found


def converted(arch: str, tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors, as llama.cpp's converter changes them before it writes them."""
    match arch:
        case "gpt-oss":
            return as_converted(tensors)
        case "gemma3n":
            return stream_tensors(tensors, config.vocab_size)
        case "qwen2vl" | "qwen3vl" | "qwen3vlmoe":
            return text_tensors(tensors)
        case "qwen3next" | "qwen35" | "qwen35moe":
            return hybrid_tensors(tensors, config, tiles_heads=arch != "qwen3next")
    return tensors
