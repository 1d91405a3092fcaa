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

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
WORDS = ("Ġthe", "Ġof", "he", "th", "in", "er", "an", "Ġt", "Ġo", "Ġa")
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")


@dataclass
class GgufFile:
    """What is written; tests change it."""

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


def from_model(arch: str, model: Any, type_of: Any, vocabulary: dict[str, Any]) -> GgufFile:
    """type_of: name of the type for a matrix, by its name in transformers. Vectors are F32."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    file = GgufFile(arch, {f"{arch}.{key}": value for key, value in own.items()} | vocabulary)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        kind = gguf.GGMLQuantizationType[type_of(name) if tensor.dim() == 2 else "F32"]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        found = next((count for part, count in heads.items() if part in name), None)
        permuted = interleave(tensor, found) if arch == "llama" and found is not None else tensor
        content = quantize(permuted.float().numpy(), kind)
        file.tensors[gguf_name(name)] = (content, kind)
        numbers = torch.from_numpy(np.asarray(gguf.dequantize(content.view(_raw(kind)), kind), np.float32))
        exact = numbers.view(tensor.shape)
        file.exact[name] = separate(exact, found) if arch == "llama" and found is not None else exact
    return file


def _raw(kind: gguf.GGMLQuantizationType) -> Any:
    return {"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8)


def quantize(numbers: NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> NDArray[np.generic]:
    """Random bytes with small scales where the package does not quantise."""
    try:
        content: NDArray[np.generic] = gguf.quantize(numbers, kind)
        return content
    except NotImplementedError:
        values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(len(numbers))
        blocks = rng.integers(0, 256, (numbers.size // values, num_bytes), dtype=np.uint8)
        scale_places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}[kind.name]
        size = {"Q4_K": 4e-4, "Q5_K": 2e-4, "Q6_K": 8e-5, "IQ4_NL": 2e-3}[kind.name]
        for place in scale_places:
            scales = rng.uniform(0.5 * size, size, (len(blocks), 1)).astype(np.float16)
            blocks[:, place : place + 2] = scales.view(np.uint8)
        return blocks.reshape(len(numbers), -1)


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head in the order 0, n/2, 1, n/2 + 1, …, as llama.cpp's converter stores q and k of Llama."""
    rows = weight.view(heads, 2, -1, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)


def separate(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows = weight.view(heads, -1, 2, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _WHOLE:
        return f"{_WHOLE[module]}.{kind}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    assert match is not None
    return f"blk.{match[1]}.{_NAMES[match[2]]}.{kind}"
