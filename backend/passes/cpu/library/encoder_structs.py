"""Functions and structs of the CPU kernels for encoders and vision towers, as kernels/encoder/ declares them."""

from __future__ import annotations

from ctypes import CDLL, Structure, c_int64, c_void_p
from enum import IntEnum

from penstock.backend.checkpoint.encoders.encoder_config import Activation
from penstock.backend.passes.cpu.library.native_structs import LinearOutput, declare_functions


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
