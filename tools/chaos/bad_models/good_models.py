"""Small models that work, as file contents in memory: what the fuzzer damages."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from penstock.tools.random_model import ModelDims, write_random_model

CONFIG, WEIGHTS, TOKENIZER, GGUF = "config.json", "model.safetensors", "tokenizer.json", "model.gguf"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"

_LLAMA = ModelDims(
    hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=256, vocab_size=512, max_context=128, dtype="fp32"
)
_BERT = ModelDims(hidden_size=64, layers=1, heads=2, intermediate_size=64, vocab_size=512, architecture="bert")
_GROUP = 32
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class GoodModel:
    """The files of a model by name: a directory, perhaps with an adapter in it, or one GGUF file."""

    name: str
    files: dict[str, bytes]
    targets: tuple[str, ...]
    """Files that are damaged."""


def make_good_models() -> list[GoodModel]:
    plain, encoder = _random_model(_LLAMA), _random_model(_BERT)
    models = [GoodModel("llama", plain, tuple(plain)), GoodModel("bert", encoder, tuple(encoder))]
    models.append(GoodModel("gguf", {GGUF: _as_gguf(plain)}, (GGUF,)))
    models.append(GoodModel("lora", plain | _adapter(plain), (ADAPTER_CONFIG, ADAPTER_WEIGHTS)))
    quantized = ((name, _quantized(plain, *how)) for name, how in _QUANTIZED.items())
    return models + [GoodModel(name, files, (CONFIG, WEIGHTS)) for name, files in quantized]


def _random_model(dims: ModelDims) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as folder:
        write_random_model(out := Path(folder, "model"), dims)
        return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def _linears(tensors: Tensors) -> dict[str, tuple[int, int]]:
    """Name → outputs and inputs."""
    return {name[:-7]: (len(x), x.shape[1]) for name, x in tensors.items() if name.endswith("_proj.weight")}


def _adapter(plain: dict[str, bytes]) -> dict[str, bytes]:
    rank, linears, parts = 4, _linears(load(plain[WEIGHTS])), {}
    for name, (outputs, inputs) in linears.items():
        parts[f"base_model.model.{name}.lora_A.weight"] = torch.full((rank, inputs), 0.01)
        parts[f"base_model.model.{name}.lora_B.weight"] = torch.full((outputs, rank), 0.01)
    modules = sorted({name.rpartition(".")[2] for name in linears})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": modules, "bias": "none"}
    return {ADAPTER_CONFIG: json.dumps(config).encode(), ADAPTER_WEIGHTS: save(parts)}


def _quantized(
    plain: dict[str, bytes], config: dict[str, Any], quantize: Callable[[int, int], Tensors]
) -> dict[str, bytes]:
    tensors = load(plain[WEIGHTS])
    for name, shape in _linears(tensors).items():
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": tensor for part, tensor in quantize(*shape).items()}
    settings = json.loads(plain[CONFIG]) | {"quantization_config": config}
    return plain | {CONFIG: json.dumps(settings).encode(), WEIGHTS: save(tensors)}


def _words(*shape: int) -> Tensor:
    return torch.full(shape, 0x11111111, dtype=torch.int32)


def _halves(*shape: int) -> Tensor:
    return torch.full(shape, 0.01, dtype=torch.float16)


def _gptq(outputs: int, inputs: int) -> Tensors:
    groups, index = inputs // _GROUP, torch.arange(inputs, dtype=torch.int32) // _GROUP
    values = {"qweight": _words(inputs // 8, outputs), "qzeros": _words(groups, outputs // 8)}
    return values | {"scales": _halves(groups, outputs), "g_idx": index}


def _awq(outputs: int, inputs: int) -> Tensors:
    groups = inputs // _GROUP
    values = {"qweight": _words(inputs, outputs // 8), "qzeros": _words(groups, outputs // 8)}
    return values | {"scales": _halves(groups, outputs)}


def _fp8(outputs: int, inputs: int) -> Tensors:
    return {"weight": torch.ones(outputs, inputs).to(torch.float8_e4m3fn), "weight_scale_inv": torch.tensor(0.01)}


def _packed(outputs: int, inputs: int) -> Tensors:
    values = {"weight_packed": _words(outputs, inputs // 8), "weight_scale": _halves(outputs, inputs // _GROUP)}
    return values | {"weight_shape": torch.tensor([outputs, inputs])}


def _nf4(outputs: int, inputs: int) -> Tensors:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [outputs, inputs]}
    note = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return {
        "weight": torch.full((outputs * inputs // 2, 1), 0x11, dtype=torch.uint8),
        "weight.absmax": torch.full((outputs * inputs // 64,), 0.01),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": note,
    }


_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
_GROUPS = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}}, "ignore": ["lm_head"]}
_QUANTIZED: dict[str, tuple[dict[str, Any], Callable[[int, int], Tensors]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True}, _gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm", "zero_point": True}, _awq),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}, _fp8),
    "compressed": ({"quant_method": "compressed-tensors", "format": "pack-quantized"} | _GROUPS, _packed),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _nf4),
}

_GGUF_TYPES = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q5_0", "ffn_gate": "Q5_1", "ffn_down": "Q4_K"}
"""Types of some matrices; those of the others are Q8_0."""


def _as_gguf(plain: dict[str, bytes]) -> bytes:
    """The model with the same dimensions and vocabulary. Its blocks are one byte again and again, which makes small
    finite scales in all types."""
    model = json.loads(plain[TOKENIZER])["model"]
    tokens = sorted(model["vocab"], key=lambda token: int(model["vocab"][token]))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, _LLAMA.layers)
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as folder:
        writer = gguf.GGUFWriter(path := Path(folder, GGUF), "llama")
        writer.add_context_length(_LLAMA.max_context)
        writer.add_embedding_length(_LLAMA.hidden_size)
        writer.add_block_count(_LLAMA.layers)
        writer.add_feed_forward_length(_LLAMA.intermediate_size)
        writer.add_head_count(_LLAMA.heads)
        writer.add_head_count_kv(_LLAMA.kv_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
        writer.add_eos_token_id(0)
        writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
        for name, tensor in load(plain[WEIGHTS]).items():
            full = names.get_name(name, try_suffixes=(".weight",)) or name
            if tensor.dim() == 1:
                writer.add_tensor(full, tensor.numpy())
                continue
            kind = gguf.GGMLQuantizationType[_GGUF_TYPES.get(full.split(".")[-2], "Q8_0")]
            values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
            blocks = np.full((len(tensor), tensor.shape[1] // values * num_bytes), 0x11, np.uint8)
            writer.add_tensor(full, blocks, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()
