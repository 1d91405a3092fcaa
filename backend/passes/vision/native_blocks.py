"""Blocks of plain vision transformers by our own CPU kernels, which encoders have too, in place of torch's.

A block adds the attention of a norm and then the MLP of a norm to the residual stream, which stays in fp32. A patch
attends to all of its tile, picture or window; positions are learned and added in front, or rotary on two axes.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.backend.checkpoint.config_json import choose_dtype, read_declared_dtype
from penstock.backend.checkpoint.encoders.encoder_config import Activation
from penstock.backend.dtypes import Dtype
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.cpu.library.encoder_structs import (
    OUTPUTS,
    EncoderAttention,
    EncoderOperation,
    EncoderStepRows,
    declare_encoder_functions,
)
from penstock.backend.passes.cpu.library.native_structs import NORM_KINDS, Buffer, LinearOutput, Operation, Shape
from penstock.backend.passes.cpu.library.thread_counts import SPIN_S, num_usable_cores
from penstock.backend.passes.cpu.path_choice import load_kernels, multiplies_bf16
from penstock.backend.passes.cpu.weight_memory.native_weights import PackedLinear, WeightPacker

_HEAD_UNIT = 16
"""The kernels' heads are a multiple of it."""
_QUICK_GELU = 1.702
"""x × sigmoid(1.702 x) is silu(1.702 x) / 1.702."""


@dataclass(frozen=True, slots=True)
class _Names:
    """Where transformers keeps a block's parts."""

    norms: tuple[str, str]
    qkv: tuple[str, ...]
    output: str
    mlp_in: tuple[str, ...]
    """Two of a gated MLP."""
    mlp_out: str
    factors: tuple[str, ...] = ()
    """Of what attention and MLP add."""


def _qkv(attention: str) -> tuple[str, ...]:
    return tuple(f"{attention}.{part}_proj" for part in "qkv")


def _qwen(*mlp: str) -> _Names:
    *mlp_in, mlp_out = (f"mlp.{name}" for name in mlp)
    return _Names(("norm1", "norm2"), ("attn.qkv",), "attn.proj", tuple(mlp_in), mlp_out)


_CLIP = _Names(("layer_norm1", "layer_norm2"), _qkv("self_attn"), "self_attn.out_proj", ("mlp.fc1",), "mlp.fc2")
_QWEN3 = _qwen("linear_fc1", "linear_fc2")
_BLOCKS = {
    "CLIPEncoderLayer": _CLIP,
    "Idefics3EncoderLayer": _CLIP,
    "SiglipEncoderLayer": _CLIP,
    "SmolVLMEncoderLayer": _CLIP,
    "InternVLVisionLayer": _Names(
        ("layernorm_before", "layernorm_after"),
        _qkv("attention"),
        "attention.projection_layer",
        ("mlp.fc1",),
        "mlp.fc2",
        ("lambda_1", "lambda_2"),
    ),
    "PixtralAttentionLayer": _Names(
        ("attention_norm", "ffn_norm"),
        _qkv("attention"),
        "attention.o_proj",
        ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "feed_forward.down_proj",
    ),
    "Qwen2VLVisionBlock": _qwen("fc1", "fc2"),
    "Qwen2_5_VLVisionBlock": _qwen("gate_proj", "up_proj", "down_proj"),
    "Qwen3VLVisionBlock": _QWEN3,
    "Qwen3VLMoeVisionBlock": _QWEN3,
    "Qwen3_5VisionBlock": _QWEN3,
    "Qwen3_5MoeVisionBlock": _QWEN3,
}
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "silu",
    "silu": "silu",
}


@dataclass(frozen=True, slots=True)
class _Layout:
    """What all blocks of a tower have in common."""

    names: _Names
    num_heads: int
    head_dim: int
    output: LinearOutput
    """Of the MLP's first linear."""
    is_quick: bool
    """Its activation is the quick GELU."""

    @classmethod
    def of(cls, model: nn.Module, vision: Any) -> _Layout | None:
        """None for blocks that the kernels do not support. vision: transformers' config of the tower."""
        blocks = _blocks(model)
        names = _BLOCKS.get(type(blocks[0]).__name__) if blocks else None
        activation = _ACTIVATIONS.get(str(getattr(vision, "hidden_act", None)))
        if names is None or activation is None or getattr(vision, "use_qk_norm", False):
            return None
        output = OUTPUTS.get((activation, len(names.mlp_in) == 2))
        width, inputs = (blocks[0].get_submodule(name).in_features for name in (names.output, names.mlp_out))
        num_heads = getattr(vision, "num_attention_heads", None) or vision.num_heads
        if output is None or width % (2 * num_heads) or inputs % 2:
            return None
        return cls(names, num_heads, width // num_heads, output, vision.hidden_act == "quick_gelu")

    @property
    def padded_dim(self) -> int:
        return -(-self.head_dim // _HEAD_UNIT) * _HEAD_UNIT

    def padded(self, x: Tensor, dim: int) -> Tensor:
        """Fill heads along the dimension with zeros. Halves, which are rotated together, stay halves."""
        if self.padded_dim == self.head_dim:
            return x
        x = x.movedim(dim, -1)
        halves = x.reshape(*x.shape[:-1], -1, self.head_dim // 2)
        return functional.pad(halves, (0, (self.padded_dim - self.head_dim) // 2)).flatten(-2).movedim(-1, dim)


def _blocks(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ in _BLOCKS]


def kernels_dtype(model_dir: Path, options: PassOptions) -> Dtype:
    """Of weights and activations in the kernels: the model's, but fp32 on CPUs without products of bf16."""
    own = choose_dtype(options.dtype, read_declared_dtype(model_dir) or Dtype.BF16)
    return own if multiplies_bf16(options.cpu_path) else Dtype.FP32


def saved_bytes(model: nn.Module, vision: Any, dtype: Dtype) -> int:
    """Bytes that the blocks' weights need less than in fp32, if `use_kernels` packs them."""
    if (layout := _Layout.of(model, vision)) is None:
        return 0
    blocks, names = _blocks(model), layout.names
    attention, mlp = (
        sum(int(blocks[0].get_submodule(part).weight.numel()) for part in parts)
        for parts in ((*names.qkv, names.output), (*names.mlp_in, names.mlp_out))
    )
    num_packed = attention * layout.padded_dim // layout.head_dim + mlp
    return len(blocks) * (4 * (attention + mlp) - dtype.itemsize * num_packed)


def use_kernels(model: nn.Module, vision: Any, cpu_path: str, dtype: Dtype) -> None:
    """Let the blocks of a tower run by the kernels, if they can. Their weights are packed, and torch's freed."""
    layout, kernels = _Layout.of(model, vision), load_kernels(cpu_path)
    if layout is None or kernels is None:
        return
    blocks = _blocks(model)
    engine = _Engine(kernels.library, layout, blocks[0], dtype, uses_tiles=kernels.path.uses_tiles)
    with torch.no_grad():
        for block in blocks:
            block.forward = partial(engine.run, engine.pack(block))
            for parameter in block.parameters():
                parameter.data = torch.empty(0)


@dataclass(frozen=True, slots=True)
class _PackedBlock:
    norms: tuple[Tensor, Tensor]
    """[weight | bias] of a layer norm."""
    qkv: PackedLinear
    output: PackedLinear
    mlp_in: PackedLinear
    mlp_out: PackedLinear


class _Engine:
    """The threads of the kernels, and the activations of one block."""

    def __init__(self, library: ctypes.CDLL, layout: _Layout, block: Any, dtype: Dtype, *, uses_tiles: bool) -> None:
        declare_encoder_functions(library)
        self._library = library
        self._layout = layout
        norm, hidden = block.get_submodule(layout.names.norms[0]), block.get_submodule(layout.names.output).out_features
        self._hidden_size = hidden
        shape = Shape(
            hidden=hidden,
            num_heads=layout.num_heads,
            num_kv_heads=layout.num_heads,
            head_dim=layout.padded_dim,
            rotary_dim=layout.padded_dim,
            page_size=16,
            act_bf16=dtype is Dtype.BF16,
            uses_tiles=uses_tiles,
            rope_width=layout.padded_dim,
            norm_kind=NORM_KINDS["layer" if isinstance(norm, nn.LayerNorm) else "rms"],
            eps=norm.eps if isinstance(norm, nn.LayerNorm) else norm.variance_epsilon,
            score_scale=layout.head_dim**-0.5,
        )
        self._engine = library.ps_create(num_usable_cores(), round(SPIN_S * 1e9), byref(shape))
        # Not at exit: the tower's thread may still be in a block.
        weakref.finalize(self, library.ps_destroy, self._engine).atexit = False
        self._packer = WeightPacker(library, self._engine, dtype)
        width = layout.num_heads * layout.padded_dim
        inner = block.get_submodule(layout.names.mlp_out).in_features
        self._hidden, self._qkv, self._attended, self._activated = (
            Buffer(size, dtype) for size in (hidden, 3 * width, width, inner)
        )

    def pack(self, block: Any) -> _PackedBlock:
        layout, names = self._layout, self._layout.names
        quick = _QUICK_GELU if layout.is_quick else 1.0
        factors = [block.get_parameter(name)[:, None] for name in names.factors] or [1.0, 1.0]

        def pack(
            parts: tuple[str, ...], factor: Any = 1.0, dim: int | None = None, weights: float = 1.0
        ) -> PackedLinear:
            """The linears one behind the other. dim: of which heads are filled. weights: another factor, of these."""
            linears = [block.get_submodule(part) for part in parts]
            weight, bias = torch.cat([each.weight for each in linears]) * factor * weights, None
            if linears[0].bias is not None:
                bias = (torch.cat([each.bias for each in linears])[:, None] * factor).flatten()
                bias = layout.padded(bias, 0) if dim == 0 else bias
            weight = weight if dim is None else layout.padded(weight, dim)
            return self._packer.pack(weight, bias, 1.0, is_gated=len(parts) == 2)

        norms = [torch.cat([*block.get_submodule(name).parameters()]).float() for name in names.norms]
        return _PackedBlock(
            (norms[0], norms[1]),
            pack(names.qkv, dim=0),
            pack((names.output,), factors[0], dim=1),
            pack(names.mlp_in, quick),
            pack((names.mlp_out,), factors[1], weights=1 / quick),
        )

    def run(
        self,
        block: _PackedBlock,
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
        **__: Any,
    ) -> Tensor:
        """The forward pass of a block, as transformers calls it. There is one picture, so no mask hides anything.
        cu_seqlens: where windows start and end."""
        result = hidden_states.clone(memory_format=torch.contiguous_format)
        residual, num_tokens = result.data_ptr(), result.numel() // self._hidden_size
        for buffer in (self._hidden, self._qkv, self._attended, self._activated):
            buffer.reserve(num_tokens)
        hidden, qkv, attended = self._hidden.address, self._qkv.address, self._attended.address
        activated, attention = self._activated.address, EncoderAttention(window=-1)
        norm, linear = partial(Operation, EncoderOperation.NORM), partial(Operation, EncoderOperation.LINEAR)
        before = [
            norm(block.norms[0].data_ptr(), residual, hidden),
            linear(block.qkv.address, hidden, qkv, LinearOutput.STORE),
        ]
        turns = None
        if position_embeddings is not None:
            halves = [self._layout.padded(each.reshape(num_tokens, -1).float(), 1) for each in position_embeddings]
            turns = torch.cat([each[:, : self._layout.padded_dim // 2] for each in halves], 1)
            before.append(Operation(EncoderOperation.ROTATE, ctypes.addressof(attention), None, qkv))
        self._run(before, torch.tensor([0, num_tokens]), turns)
        starts = torch.arange(0, num_tokens + 1, result.shape[-2]) if cu_seqlens is None else cu_seqlens
        after = [
            Operation(EncoderOperation.ATTENTION, ctypes.addressof(attention), qkv, attended),
            linear(block.output.address, attended, residual, LinearOutput.ADD),
            norm(block.norms[1].data_ptr(), residual, hidden),
            linear(block.mlp_in.address, hidden, activated, self._layout.output),
            linear(block.mlp_out.address, activated, residual, LinearOutput.ADD),
        ]
        self._run(after, starts, None)
        return result

    def _run(self, operations: list[Operation], starts: Tensor, turns: Tensor | None) -> None:
        """turns: [patches, padded_dim] cosines and sines."""
        starts = starts.to(torch.int32).contiguous()
        rows = EncoderStepRows(
            starts=starts.data_ptr(),
            rope=None if turns is None else turns.data_ptr(),
            num_tokens=int(starts[-1]),
            num_rows=len(starts) - 1,
        )
        self._library.ps_plan_encoder(self._engine, byref(rows))
        array = (Operation * len(operations))(*operations)
        self._library.ps_run_encoder(self._engine, array, len(operations))
