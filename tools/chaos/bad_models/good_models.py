"""Small models that work, as file contents in memory: what the fuzzer damages."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from penstock.backend.checkpoint.formats.numbers.ggml import BLOCK_TYPES
from penstock.tools.chaos.bad_models.gguf_file import GgufFile, TensorInfo
from penstock.tools.random_model import ModelDims, write_random_model

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
GGUF = "model.gguf"

_DIMS = ModelDims(
    hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=256, vocab_size=512, max_context=128, dtype="fp32"
)
_GROUP = 32
_BLOCK_BYTE = b"\x11"
"""Blocks of this byte have small finite scales in all types of GGML."""

Tensors = dict[str, Tensor]


@dataclass
class GoodModel:
    """The files of a model by name. One with an adapter has it in a folder of its own; a GGUF model is one file."""

    name: str
    files: dict[str, bytes]
    gguf: GgufFile | None = None
    targets: list[str] = field(default_factory=list)
    """Files that are damaged; by default all."""

    def __post_init__(self) -> None:
        self.targets = self.targets or list(self.files) or [GGUF]


def make_good_models() -> list[GoodModel]:
    plain = _random_model(_DIMS)
    encoder = _random_model(ModelDims(**vars(_DIMS) | {"architecture": "bert", "layers": 1}))
    models = [GoodModel("llama", plain), GoodModel("bert", encoder), GoodModel("gguf", {}, _as_gguf(plain))]
    adapter = plain | _adapter(load(plain[WEIGHTS]))
    models.append(GoodModel("lora", adapter, targets=[ADAPTER_CONFIG, ADAPTER_WEIGHTS]))
    for method, (config, quantize) in _QUANTIZED.items():
        models.append(GoodModel(method, _quantized(plain, config, quantize), targets=[CONFIG, WEIGHTS]))
    return models


def _random_model(dims: ModelDims) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as folder:
        out = Path(folder, "model")
        write_random_model(out, dims)
        return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def _linears(tensors: Tensors) -> list[str]:
    return [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]


def _adapter(tensors: Tensors) -> dict[str, bytes]:
    rank = 4
    parts: Tensors = {}
    for name in _linears(tensors):
        outputs, inputs = tensors[f"{name}.weight"].shape
        parts[f"base_model.model.{name}.lora_A.weight"] = torch.full((rank, inputs), 0.01)
        parts[f"base_model.model.{name}.lora_B.weight"] = torch.full((outputs, rank), 0.01)
    modules = sorted({name.rpartition(".")[2] for name in _linears(tensors)})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": modules, "bias": "none"}
    return {ADAPTER_CONFIG: json.dumps(config).encode(), ADAPTER_WEIGHTS: save(parts)}


# ---- Quantised layouts; the numbers do not matter ----


def _quantized(
    plain: dict[str, bytes], config: dict[str, Any], quantize: Callable[[int, int], Tensors]
) -> dict[str, bytes]:
    tensors = load(plain[WEIGHTS])
    for name in _linears(tensors):
        parts = quantize(*tensors.pop(f"{name}.weight").shape)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    settings = json.loads(plain[CONFIG]) | {"quantization_config": config}
    return plain | {CONFIG: json.dumps(settings).encode(), WEIGHTS: save(tensors)}


def _words(*shape: int) -> Tensor:
    return torch.full(shape, 0x11111111, dtype=torch.int32)


def _halves(*shape: int) -> Tensor:
    return torch.full(shape, 0.01, dtype=torch.float16)


def _gptq(outputs: int, inputs: int) -> Tensors:
    groups = inputs // _GROUP
    return {
        "qweight": _words(inputs // 8, outputs),
        "qzeros": _words(groups, outputs // 8),
        "scales": _halves(groups, outputs),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // _GROUP,
    }


def _awq(outputs: int, inputs: int) -> Tensors:
    parts = _gptq(outputs, inputs)
    return {"qweight": _words(inputs, outputs // 8), "qzeros": parts["qzeros"], "scales": parts["scales"]}


def _fp8(outputs: int, inputs: int) -> Tensors:
    return {"weight": torch.ones(outputs, inputs).to(torch.float8_e4m3fn), "weight_scale_inv": torch.tensor(0.01)}


def _packed(outputs: int, inputs: int) -> Tensors:
    return {
        "weight_packed": _words(outputs, inputs // 8),
        "weight_scale": _halves(outputs, inputs // _GROUP),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def _nf4(outputs: int, inputs: int) -> Tensors:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [outputs, inputs]}
    note = bytearray(json.dumps(state).encode())
    return {
        "weight": torch.full((outputs * inputs // 2, 1), 0x11, dtype=torch.uint8),
        "weight.absmax": torch.full((outputs * inputs // 64,), 0.01),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(note, dtype=torch.uint8),
    }


_PACKED_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
_QUANTIZED: dict[str, tuple[dict[str, Any], Callable[[int, int], Tensors]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True}, _gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm", "zero_point": True}, _awq),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}, _fp8),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _PACKED_WEIGHTS}},
            "ignore": ["lm_head"],
        },
        _packed,
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _nf4),
}


# ---- GGUF ----

_GGUF_NAMES = {
    "model.embed_tokens": ("token_embd", "Q8_0"),
    "model.norm": ("output_norm", "F32"),
    "input_layernorm": ("attn_norm", "F32"),
    "post_attention_layernorm": ("ffn_norm", "F32"),
    "self_attn.q_proj": ("attn_q", "Q4_0"),
    "self_attn.k_proj": ("attn_k", "Q4_1"),
    "self_attn.v_proj": ("attn_v", "Q5_0"),
    "self_attn.o_proj": ("attn_output", "F16"),
    "mlp.gate_proj": ("ffn_gate", "Q5_1"),
    "mlp.up_proj": ("ffn_up", "BF16"),
    "mlp.down_proj": ("ffn_down", "Q4_K"),
}
"""Name in the checkpoint → name in GGUF, and the type that the tensor gets."""
_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def _as_gguf(plain: dict[str, bytes]) -> GgufFile:
    """The model with the same dimensions and vocabulary; its weights are blocks of one byte."""
    model = json.loads(plain[TOKENIZER])["model"]
    tokens = sorted(model["vocab"], key=lambda token: int(model["vocab"][token]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    file = GgufFile()
    file.add("general.architecture", "llama")
    for key, number in {
        "context_length": _DIMS.max_context,
        "embedding_length": _DIMS.hidden_size,
        "block_count": _DIMS.layers,
        "feed_forward_length": _DIMS.intermediate_size,
        "attention.head_count": _DIMS.heads,
        "attention.head_count_kv": _DIMS.kv_heads,
        "attention.key_length": _DIMS.hidden_size // _DIMS.heads,
        "rope.dimension_count": _DIMS.hidden_size // _DIMS.heads,
        "vocab_size": _DIMS.vocab_size,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
    }.items():
        file.add(f"llama.{key}", number)
    for key, value in {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": tokens,
        "token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }.items():
        file.add(f"tokenizer.ggml.{key}", value)
    file.add("tokenizer.chat_template", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, tensor in load(plain[WEIGHTS]).items():
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        is_layer = layer.isdecimal()
        own, type_name = _GGUF_NAMES[(part if is_layer else name).removesuffix(".weight")]
        full = f"blk.{layer}.{own}.weight" if is_layer else f"{own}.weight"
        if type_name in _FLOAT_BYTES:
            num_bytes = tensor.numel() * _FLOAT_BYTES[type_name]
        else:
            num_bytes = tensor.numel() // BLOCK_TYPES[type_name].values * BLOCK_TYPES[type_name].num_bytes
        file.add_tensor(TensorInfo(full, list(reversed(tensor.shape)), type_name), _BLOCK_BYTE * num_bytes)
    return file
