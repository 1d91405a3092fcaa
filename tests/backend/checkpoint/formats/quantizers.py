"""Writes tiny checkpoints in other programs' quantised formats, and says what their weights are.

Values are random integers with random scales, written and read back here by the formats' definitions, number by number
or in float64; nothing is shared with the readers under test.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import load_oracle, make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

Tensors = dict[str, torch.Tensor]


@dataclass
class Checkpoint:
    """A quantised checkpoint, and its linears' weights in float64, by name."""

    path: Path
    exact: dict[str, torch.Tensor]

    @property
    def file(self) -> Path:
        return self.path / "model.safetensors"


def write_checkpoint(
    path: Path,
    config: dict[str, Any],
    quantize: Callable[[np.random.Generator, int, int], tuple[Tensors, torch.Tensor]],
    *,
    plain: tuple[str, ...] = ("lm_head", "embed_tokens"),
    architecture: str = "llama-bias",
    **overrides: Any,
) -> Checkpoint:
    """A tiny model whose linears, but for those named in plain, are what quantize makes for (rng, outputs, inputs)."""
    settings = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2} | overrides
    make_checkpoint(architecture, path, **settings)
    rng = np.random.default_rng(0)
    tensors: Tensors = {}
    exact = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or any(part in module for part in plain):
            tensors[name] = tensor
            continue
        parts, exact[name] = quantize(rng, *tensor.shape)
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((path / "config.json").read_text())
    key = "quantization_config" if "quant_method" in config else "quantization"
    (path / "config.json").write_text(json.dumps(values | {key: config}))
    return Checkpoint(path, exact)


def load_reference(checkpoint: Checkpoint, plain_dir: Path) -> Any:
    """The model of transformers with the weights that the checkpoint stands for, in fp32."""
    settings = json.loads((checkpoint.path / "config.json").read_text())
    settings = {key: value for key, value in settings.items() if not key.startswith("quantization")}
    plain_dir.mkdir()
    (plain_dir / "config.json").write_text(json.dumps(settings))
    stored = load_file(checkpoint.file)
    floats = {
        name: tensor
        for name, tensor in stored.items()
        if tensor.dtype is torch.float32 and name.endswith((".weight", ".bias"))
    }
    exact = {name: tensor.float() for name, tensor in checkpoint.exact.items()}
    save_file(floats | exact, plain_dir / "model.safetensors", metadata={"format": "pt"})
    return load_oracle(plain_dir)


def change_config(checkpoint: Checkpoint, **changes: Any) -> None:
    """Change settings of quantization_config; None removes one."""
    file = checkpoint.path / "config.json"
    values = json.loads(file.read_text())
    settings = values["quantization_config"] | changes
    values["quantization_config"] = {key: value for key, value in settings.items() if value is not None}
    file.write_text(json.dumps(values))


def pack_words(values: NDArray[np.int64], bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 [n, m × bits / 32] of [n, m]: position i of a word, from the lowest bits, holds its value order[i]."""
    per_word = 32 // bits
    words = np.zeros((values.shape[0], values.shape[1] // per_word), np.int64)
    for i in range(per_word):
        words |= values[:, (i if order is None else order[i]) :: per_word] << (bits * i)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def random_scales(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.from_numpy(rng.uniform(0.01, 0.05, shape)).to(dtype)


def gptq(
    bits: int = 4, group_size: int = 32, *, act_order: bool = False, offset: int = 1, zeros: tuple[int, int] = (8, 9)
) -> Callable[[np.random.Generator, int, int], tuple[Tensors, torch.Tensor]]:
    """zeros: the range of the zero points, the end excluded."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
        groups = 1 if group_size == -1 else inputs // group_size
        values = rng.integers(0, 1 << bits, (outputs, inputs))
        zero = rng.integers(*zeros, (outputs, groups))
        scales = random_scales(rng, outputs, groups)
        g_idx = np.arange(inputs) // (inputs // groups)
        if act_order:
            rng.shuffle(g_idx)
        exact = scales.double()[:, g_idx] * torch.from_numpy(values - zero[:, g_idx])
        parts = {
            "qweight": pack_words(values, bits).T,
            "qzeros": pack_words(zero.T - offset, bits),
            "scales": scales.T,
            "g_idx": torch.from_numpy(g_idx.astype(np.int32)),
        }
        return parts, exact

    return quantize


def awq(group_size: int = 32) -> Callable[[np.random.Generator, int, int], tuple[Tensors, torch.Tensor]]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
        groups = inputs // group_size
        values, zero = rng.integers(0, 16, (outputs, inputs)), rng.integers(0, 16, (outputs, groups))
        scales = random_scales(rng, outputs, groups)
        g_idx = np.arange(inputs) // group_size
        exact = scales.double()[:, g_idx] * torch.from_numpy(values - zero[:, g_idx])
        parts = {
            "qweight": pack_words(values.T, 4, order),
            "qzeros": pack_words(zero.T, 4, order),
            "scales": scales.T,
        }
        return parts, exact

    return quantize


def awq_gemv(group_size: int) -> Callable[[np.random.Generator, int, int], tuple[Tensors, torch.Tensor]]:
    """Pack like AutoAWQ's WQLinear_GEMV: along the inputs, groups padded to a multiple of a few words."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
        groups, multiple = inputs // group_size, {32: 4, 64: 2}.get(group_size, 1)
        width = -(-groups // (8 * multiple)) * 8 * multiple
        values, zero = rng.integers(0, 16, (outputs, inputs)), rng.integers(0, 16, (outputs, groups))
        scales = random_scales(rng, outputs, groups)
        g_idx = np.arange(inputs) // group_size
        padding = [(0, 0), (0, width - groups)]
        parts = {
            "qweight": pack_words(values, 4),
            "qzeros": pack_words(np.pad(zero, padding), 4),
            "scales": torch.nn.functional.pad(scales, (0, width - groups)),
        }
        return parts, scales.double()[:, g_idx] * torch.from_numpy(values - zero[:, g_idx])

    return quantize


def awq_gemv_fast(group_size: int) -> Callable[[np.random.Generator, int, int], tuple[Tensors, torch.Tensor]]:
    """Pack like AutoAWQ's WQLinear_GEMVFast: 64 inputs of four outputs in 64 words of 16 bits."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
        groups, multiple = inputs // group_size, {32: 4, 64: 2}.get(group_size, 1)
        width = -(-groups // (8 * multiple)) * 8 * multiple
        values, zero = rng.integers(0, 16, (outputs, inputs)), rng.integers(0, 16, (outputs, groups))
        scales = random_scales(rng, outputs, groups)
        words = np.zeros((outputs // 4, inputs), np.int64)
        for column in range(inputs):
            block, of_32 = column // 64, column % 32
            place = column % 64 // 32 * 32 + of_32 % 8 // 2 * 8 + of_32 % 2 * 4 + of_32 // 8
            for row in range(4):
                word, quarter = divmod(row * 64 + place, 4)
                words[:, block * 64 + word] |= values[row::4, column] << 4 * quarter
        qzeros = (scales.double() * -torch.from_numpy(zero)).half()
        parts = {
            "qweight": torch.from_numpy(words.astype(np.uint16).view(np.int16)),
            "qzeros": torch.nn.functional.pad(qzeros, (0, width - groups)).T,
            "scales": torch.nn.functional.pad(scales, (0, width - groups)).T,
        }
        g_idx = np.arange(inputs) // group_size
        return parts, scales.double()[:, g_idx] * torch.from_numpy(values - zero[:, g_idx])

    return quantize


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Table 8 of arXiv 2305.14314, in fp32."""


def nf4(*, nested: bool) -> Callable[[np.random.Generator, int, int], tuple[Tensors, torch.Tensor]]:
    """Quantise in float64, except sums and products that bitsandbytes rounds to fp32."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
        values = rng.integers(0, 16, outputs * inputs)
        num_blocks = outputs * inputs // 64
        table = torch.tensor(NF4)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [outputs, inputs]}
        parts = {"weight": torch.from_numpy((values[::2] << 4 | values[1::2]).astype(np.uint8))[:, None]}
        if nested:
            codes = rng.integers(0, 256, num_blocks)
            own, tops = torch.linspace(-1, 1, 256), random_scales(rng, -(-num_blocks // 256), dtype=torch.float32)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
            products = own[codes].double() * tops.double()[np.arange(num_blocks) // 256]
            scales = (products.float().double() + 0.0625).float()
            parts |= {"weight.absmax": torch.from_numpy(codes.astype(np.uint8))}
            parts |= {"weight.nested_absmax": tops, "weight.nested_quant_map": own}
        else:
            scales = random_scales(rng, num_blocks, dtype=torch.float32)
            parts["weight.absmax"] = scales
        note = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        parts |= {"weight.quant_map": table, "weight.quant_state.bitsandbytes__nf4": note}
        exact = table[values].double().view(-1, 64) * scales.double()[:, None]
        return parts, exact.view(outputs, inputs)

    return quantize


def llm_int8(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
    """Rounded after each product, as bitsandbytes does."""
    values = torch.from_numpy(rng.integers(-127, 128, (outputs, inputs)).astype(np.int8))
    tops = random_scales(rng, outputs, dtype=torch.float32)
    parts = {"weight": values, "SCB": tops, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, (values * tops[:, None] * 7.874015718698502e-3).double()


def int8(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
    """One scale per output, as compressed-tensors stores it."""
    values = torch.from_numpy(rng.integers(-127, 128, (outputs, inputs)).astype(np.int8))
    scales = random_scales(rng, outputs, 1, dtype=torch.float32) / 16
    return {"weight": values, "weight_scale": scales}, values.double() * scales.double()


def fp8(
    block: tuple[int, int] | None, scale_name: str = "weight_scale_inv"
) -> Callable[[np.random.Generator, int, int], tuple[Tensors, torch.Tensor]]:
    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
        values = torch.from_numpy(rng.normal(0, 60, (outputs, inputs))).to(torch.float8_e4m3fn)
        if block is None:
            scale = random_scales(rng, dtype=torch.float32) / 16
            return {
                "weight": values,
                scale_name: scale,
                "input_scale": torch.ones(()),
            }, values.double() * scale.double()
        shape = (-(-outputs // block[0]), -(-inputs // block[1]))
        scales = random_scales(rng, *shape, dtype=torch.float32) / 16
        exact = values.double()
        for row in range(outputs):
            for first in range(0, inputs, block[1]):
                exact[row, first : first + block[1]] *= scales[row // block[0], first // block[1]].double()
        return {"weight": values, scale_name: scales}, exact

    return quantize


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])


def nvfp4_of_modelopt(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
    codes = rng.integers(0, 16, (outputs, inputs))
    scales = torch.from_numpy(rng.uniform(1, 200, (outputs, inputs // 16))).to(torch.float8_e4m3fn)
    of_matrix = torch.tensor(3 / 2**14)  # few bits, so that products are exact in fp32
    exact = torch.from_numpy(E2M1[codes]) * scales.double().repeat_interleave(16, dim=1) * of_matrix.double()
    packed = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
    parts = {"weight": packed, "weight_scale": scales, "weight_scale_2": of_matrix, "input_scale": torch.ones(())}
    return parts, exact


def mlx(
    bits: int, group_size: int, dtype: torch.dtype = torch.bfloat16, zeros: tuple[int, int] | None = None
) -> Callable[[np.random.Generator, int, int], tuple[Tensors, torch.Tensor]]:
    """Values as one stream of bits for each output. zeros: the range of -bias / scale, which MLX makes an integer."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
        values = rng.integers(0, 1 << bits, (outputs, inputs))
        scales = random_scales(rng, outputs, inputs // group_size, dtype=dtype)
        zero = rng.integers(*(zeros or (1 << bits >> 1, 1 << bits)), scales.shape)
        biases = (-scales.double() * torch.from_numpy(zero)).to(dtype)
        streams = [sum(int(value) << (bits * i) for i, value in enumerate(row)) for row in values]
        content = b"".join(stream.to_bytes(inputs * bits // 8, "little") for stream in streams)
        words = torch.from_numpy(np.frombuffer(content, np.uint32).reshape(outputs, -1).copy())
        of_input = np.arange(inputs) // group_size
        exact = scales.double()[:, of_input] * torch.from_numpy(values) + biases.double()[:, of_input]
        return {"weight": words, "scales": scales, "biases": biases}, exact

    return quantize


def mxfp4_of_mlx(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
    codes, exponents = rng.integers(0, 16, (outputs, inputs)), rng.integers(-6, 1, (outputs, inputs // 32))
    exact = torch.from_numpy(E2M1[codes] * np.exp2(exponents)[:, np.arange(inputs) // 32])
    words = pack_words(codes, 4).view(torch.uint32)
    return {"weight": words, "scales": torch.from_numpy((exponents + 127).astype(np.uint8))}, exact
