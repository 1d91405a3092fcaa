"""Writes tiny GGUF files with the gguf package: a transformers model's weights under llama.cpp's names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

WORDS = ("Ġthe", "Ġof", "he", "th", "in", "er", "an", "Ġt", "Ġo", "Ġa")
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
SCALE_BYTES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
    "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""First bytes of the binary16 numbers in a block of each GGML type."""


@dataclass
class GgufFile:
    """The content to write; tests change it."""

    arch: str
    metadata: dict[str, Any]
    tensors: dict[str, tuple[NDArray[np.generic], gguf.GGMLQuantizationType]] = field(default_factory=dict)
    """Bytes of rows, or floats."""
    exact: dict[str, torch.Tensor] = field(default_factory=dict)
    """The numbers that the tensors stand for, by transformers' names."""

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.arch)
        for key, value in self.metadata.items():
            match value:
                case bool():
                    writer.add_bool(key, value)
                case int():
                    writer.add_uint32(key, value)
                case float():
                    writer.add_float32(key, value)
                case str():
                    writer.add_string(key, value)
                case _:
                    writer.add_array(key, value)
        for name, (content, kind) in self.tensors.items():
            writer.add_tensor(name, content, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def byte_tokens() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes as."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


def byte_level_vocabulary(vocab_size: int, pre: str = "llama-bpe") -> dict[str, Any]:
    pairs = [(a, b) for word in WORDS for a, b in [(word[:-1], word[-1])]]
    merges, known = [], set(byte_tokens())
    for a, b in sorted(pairs, key=lambda pair: len(pair[0])):
        if a in known and b in known:
            merges.append(f"{a} {b}")
            known.add(a + b)
    tokens = [*byte_tokens(), *(merge.replace(" ", "") for merge in merges), *SPECIAL]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]
    kinds = [3 if token in SPECIAL else 5 if token.startswith("[PAD") else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index(SPECIAL[0]),
        "tokenizer.ggml.eos_token_id": tokens.index(SPECIAL[1]),
        "tokenizer.ggml.eot_token_id": tokens.index(SPECIAL[2]),
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


_KEYS = {
    "feed_forward_length": ("intermediate_size",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim",),
    "ssm.state_size": ("linear_key_head_dim",),
    "ssm.group_count": ("linear_num_key_heads",),
    "ssm.time_step_rank": ("linear_num_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
"""Keys of metadata, and those of config.json with the same value: the first that there is."""


def metadata_of(arch: str, config: Any) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for a config of transformers."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    own: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": config.vocab_size,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    for key, aliases in _KEYS.items():
        found = [value for name in aliases if (value := getattr(config, name, None)) is not None]
        if found:
            own[key] = found[0]
    if "ssm.time_step_rank" in own:
        own["ssm.inner_size"] = config.linear_value_head_dim * config.linear_num_value_heads
        own["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config.layer_types]
    if "mrope_section" in rope:
        own["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if rope.get("rope_type") == "linear":
        own |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        own |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        own["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        others = {
            "rope.scaling.yarn_attn_factor": "attention_factor",
            "rope.scaling.yarn_beta_fast": "beta_fast",
            "rope.scaling.yarn_beta_slow": "beta_slow",
            "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
            "attention.temperature_scale": "llama_4_scaling_beta",
        }
        own |= {key: float(rope[name]) for key, name in others.items() if rope.get(name) is not None}
    if rope.get("rope_type") == "longrope":
        own["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if "sliding_attention" in ropes:
        own["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
    if arch == "olmo2" and getattr(config, "sliding_window", None):
        own["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    own |= _gemma4_metadata(config) if arch == "gemma4" else {}
    own |= _gemma3n_metadata(config) if arch == "gemma3n" else {}
    return {f"{arch}.{key}": value for key, value in own.items()}


_OF_HEAD = {
    "fc": "nextn.eh_proj", "pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm", "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def add_mtp_layer(file: GgufFile, number: int, tensors: dict[str, torch.Tensor]) -> None:
    """Add a layer that predicts further tokens, after the last: those of a checkpoint's tensors that begin with mtp."""
    file.metadata |= {f"{file.arch}.block_count": number + 1, f"{file.arch}.nextn_predict_layers": 1}
    for name, tensor in tensors.items():
        if name.startswith("mtp."):
            own = name.removeprefix("mtp.").removeprefix("layers.0.").removesuffix(".weight")
            content = (tensor + 1 if tensor.dim() == 1 else tensor).numpy()
            file.tensors[f"blk.{number}.{_OF_HEAD[own]}.weight"] = content, gguf.GGMLQuantizationType.F32


def _gemma4_metadata(config: Any) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    layers = [config.per_layer_config[index] for index in range(len(slides))]
    full, shared = layers[slides.index(False)], config.num_kv_shared_layers
    widths = [config.intermediate_size] * (len(slides) - shared)
    experts = {"expert_count": config.num_experts, "expert_used_count": config.top_k_experts}
    return {
        "feed_forward_length": widths + [config.intermediate_size << config.use_double_wide_mlp] * shared,
        "attention.head_count_kv": [layer.num_key_value_heads for layer in layers],
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.shared_kv_layers": shared,
        "attention.sliding_window_pattern": slides,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": config.head_dim,
        **({key: value for key, value in experts.items() if value}),
    }


def _gemma3n_metadata(config: Any) -> dict[str, Any]:
    shares = torch.tensor(config.activation_sparsity_pattern)
    return {
        "altup.active_idx": 0,
        "altup.num_inputs": config.altup_num_inputs,
        "activation_sparsity_scale": torch.distributions.Normal(0, 1).icdf(shares).tolist(),
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
    }


def gemma4_file(model: Any, vocabulary: dict[str, Any]) -> GgufFile:
    """A file in F32."""
    config, state = model.config, model.state_dict()
    scales = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
    bare = (".layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")
    tensors = {f"{name}.weight" if name.endswith(bare) else name: state[name] for name in state}
    others = {name: tensors.pop(name) for name in state if name.endswith(tuple(scales))}
    file = from_model("gemma4", model, lambda _: "F32", vocabulary, tensors)
    for name, tensor in others.items():
        layer, scale = name.split(".")[2], next(own for end, own in scales.items() if name.endswith(end))
        file.tensors[f"blk.{layer}.{scale}.scale"] = tensor.numpy(), gguf.GGMLQuantizationType.F32
    half = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
    factors = np.where(np.arange(half) < half // 4, 1.0, 1e30).astype(np.float32)
    file.tensors["rope_freqs.weight"] = factors, gguf.GGMLQuantizationType.F32
    return file


_EXPERT = re.compile(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(.*)")


def merge_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One tensor for all experts of a layer, under the name that llama.cpp's converter gives it."""
    merged: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            merged[name] = tensor
            continue
        block = match[1] + ".mlp" if "proj" in match[3] else match[1].removeprefix("model.") + ".feed_forward"
        experts.setdefault(f"{block}.experts.{match[3]}", {})[int(match[2])] = tensor
    return merged | {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}


def from_model(
    arch: str,
    model: Any,
    type_of: Any,
    vocabulary: dict[str, Any],
    tensors: dict[str, torch.Tensor] | None = None,
) -> GgufFile:
    """type_of: name of the type for a matrix, by its name in transformers. Vectors are F32.

    tensors: those of the model's checkpoint, where their names are not the model's own.
    """
    config = model.config.get_text_config()
    config.allow_global_per_layer_attribute_access = True
    permutes = arch in ("llama", "granite", "mistral3", "smollm3")
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    file = GgufFile(arch, metadata_of(arch, config) | vocabulary)
    for name, tensor in merge_experts(model.state_dict() if tensors is None else tensors).items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        kind = gguf.GGMLQuantizationType[type_of(name) if tensor.dim() > 1 else "F32"]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        found = next((count for part, count in heads.items() if part in name and permutes), None)
        stored = interleave(tensor, found) if found is not None else tensor
        if arch in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            stored = stored + 1
        content = quantize(stored.float().numpy(), kind)
        file.tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = (content, kind)
        numbers = torch.from_numpy(np.asarray(gguf.dequantize(content.view(_raw(kind)), kind), np.float32))
        exact = numbers.view(tensor.shape)
        file.exact[name] = separate(exact, found) if found is not None else exact
    for side in ("short", "long"):
        factors = config.rope_parameters.get(f"{side}_factor")
        if factors is not None:
            content = np.array(factors, np.float32)
            file.tensors[f"rope_factors_{side}.weight"] = (content, gguf.GGMLQuantizationType.F32)
    return file


def fuse_qkv(file: GgufFile) -> None:
    """Stack q, k and v, as in files that were made of ChatGLM's own checkpoints."""
    for name in [name for name in file.tensors if ".attn_q." in name]:
        parts = [file.tensors.pop(name.replace("attn_q", part)) for part in ("attn_q", "attn_k", "attn_v")]
        file.tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate([part for part, _ in parts]), parts[0][1]


def _raw(kind: gguf.GGMLQuantizationType) -> Any:
    return {"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8)


SCALES = {
    "Q2_K": 4e-3,
    "Q3_K": 1e-3,
    "Q4_K": 4e-4,
    "Q5_K": 2e-4,
    "Q6_K": 8e-5,
    "IQ2_XXS": 2e-3,
    "IQ3_S": 4e-4,
    "IQ4_NL": 2e-3,
    "IQ4_XS": 5e-5,
}
"""Type → size of the scales in random blocks."""


def quantize(numbers: NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> NDArray[np.generic]:
    """Random bytes with small scales where the package does not quantise."""
    try:
        content: NDArray[np.generic] = gguf.quantize(numbers, kind)
        return content
    except NotImplementedError:
        values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(len(numbers))
        blocks = rng.integers(0, 256, (numbers.size // values, num_bytes), dtype=np.uint8)
        size = SCALES[kind.name]
        for place in SCALE_BYTES[kind.name]:
            scales = rng.uniform(0.5 * size, size, (len(blocks), 1)).astype(np.float16)
            blocks[:, place : place + 2] = scales.view(np.uint8)
        return blocks.reshape(*numbers.shape[:-1], -1)


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head in the order 0, n/2, 1, n/2 + 1, …, as llama.cpp's converter stores q and k of Llama."""
    rows = weight.view(heads, 2, -1, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)


def separate(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows = weight.view(heads, -1, 2, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)
