"""The functions and structs of the native kernels that only encoders use, as kernels/encoder*.h declare them."""

from __future__ import annotations

from ctypes import CDLL, Structure, c_int64, c_void_p
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from penstock.backend.passes.cpu.native_structs import NORM_KINDS, LinearOutput, Shape, declare_functions

if TYPE_CHECKING:
    from penstock.backend.checkpoint.encoders.encoder_config import Activation, EncoderConfig


class EncoderOperation(IntEnum):
    EMBED = 0
    NORM = 1
    NORM_IN_PLACE = 2
    LINEAR = 3
    ROTATE = 4
    ATTENTION = 5
    ACTIVATE = 6
    FIRST_ATTENTION = 7
    SPREAD_FIRST = 8


ACTIVATIONS: dict[Activation, int] = {
    "identity": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "relu": 3,
    "silu": 4,
    "tanh": 5,
    "sigmoid": 6,
}
OUTPUTS: dict[tuple[Activation, bool], LinearOutput] = {
    ("gelu", False): LinearOutput.GELU_ERF,
    ("gelu_tanh", False): LinearOutput.GELU,
    ("relu", False): LinearOutput.RELU,
    ("silu", False): LinearOutput.SILU,
    ("gelu", True): LinearOutput.GATED_GELU_ERF,
    ("gelu_tanh", True): LinearOutput.GATED_GELU,
    ("silu", True): LinearOutput.GATED_SILU,
}
"""By the activation and whether the MLP is gated."""


class EncoderTables(Structure):
    _fields_ = (
        ("words", c_void_p),
        ("positions", c_void_p),
        ("token_types", c_void_p),
        ("first_position", c_int64),
    )


class EncoderAttention(Structure):
    _fields_ = (("bias", c_void_p), ("bias_reach", c_int64), ("window", c_int64), ("rope_offset", c_int64))


class FirstAttention(Structure):
    _fields_ = (("attention", c_void_p), ("residual", c_void_p), ("attended", c_void_p))


class EncoderStepRows(Structure):
    _fields_ = (
        ("input_ids", c_void_p),
        ("token_types", c_void_p),
        ("starts", c_void_p),
        ("rope", c_void_p),
        ("num_tokens", c_int64),
        ("num_rows", c_int64),
    )


def declare_encoder_functions(library: CDLL) -> None:
    declare_functions(library)
    for name, arguments in (
        ("ps_run_encoder_step", (c_void_p, c_void_p, c_void_p, c_int64)),
        ("ps_plan_encoder", (c_void_p, c_void_p)),
        ("ps_run_encoder", (c_void_p, c_void_p, c_int64)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = None, arguments


def make_encoder_shape(config: EncoderConfig, dtype: torch.dtype, *, uses_tiles: bool) -> Shape:
    return Shape(
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim=config.head_dim,
        rotary_dim=config.head_dim,
        page_size=16,
        act_bf16=dtype is torch.bfloat16,
        uses_tiles=uses_tiles,
        rope_width=config.head_dim * len(config.ropes),
        norm_kind=NORM_KINDS["layer"],
        eps=config.norm_eps,
        score_scale=config.head_dim**-0.5,
        embedding_scale=1.0,
    )
