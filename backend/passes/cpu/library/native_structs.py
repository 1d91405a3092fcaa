"""The functions of the CPU kernels and the structs that they share with Python, as kernels/ declares
them, and the memory that they compute in.
"""

from __future__ import annotations

from ctypes import CDLL, Structure, c_float, c_int, c_int64, c_void_p
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backend.dtypes import Dtype, empty_array
from penstock.backend.forward_pass import TokenLogprobs

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig, NormKind, QkNormScope
    from penstock.backend.forward_pass import ScoredTokens


class Buffer:
    """A row-major array that grows to the largest number of rows reserved so far."""

    def __init__(self, width: int, dtype: Dtype) -> None:
        self.width = width
        self.row_bytes = width * dtype.itemsize
        self.dtype = dtype
        self._num_rows = 0
        self.rows = empty_array((0, width), dtype)
        self.address = 0

    def reserve(self, num_rows: int) -> bool:
        """Return whether the array moved."""
        if num_rows <= self._num_rows:
            return False
        self._num_rows = num_rows
        self.rows = empty_array((num_rows, self.width), self.dtype)
        self.address = self.rows.ctypes.data
        return True


CACHE_FORMS = {"fp32": 0, "bf16": 1, "q8_0": 2}
NORM_KINDS: dict[NormKind, int] = {"rms": 0, "layer": 1}
QK_NORM_SCOPES: dict[QkNormScope, int] = {"head": 0, "each head": 1, "projection": 2}


class OperationKind(IntEnum):
    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROTATE_AND_STORE = 3
    ATTENTION = 4
    TAKE_LAST = 5
    ADD_NORM = 6
    CAP_LOGITS = 7
    KEEP_LOGITS = 8
    ROUTE = 9
    EXPERT_INPUTS = 10
    EXPERT_OUTPUTS = 11
    WEIGHT_ROWS = 12
    LAYER_INPUTS = 13
    WEIGHT_BY_INPUT = 14
    DELTA_NET = 15
    BEGIN_STREAMS = 16
    PREDICT_STREAMS = 17
    CORRECT_STREAMS = 18
    ADD_TO_STREAMS = 19
    TAKE_STREAM = 20
    END_STREAM = 21
    CUT_GATES = 22
    MTP_INPUTS = 23
    KEEP_GIVEN = 24


class AddNorm(IntEnum):
    """How a norm changes its target: it is added; or added, and the sum is multiplied by the number behind the weights;
    or it replaces the target."""

    ADD = 0
    ADD_AND_SCALE = 1
    STORE = 2


class LinearOutput(IntEnum):
    """A linear's use of its results: store them in the activations' type or in fp32, add them, gate them, or store
    their activation."""

    STORE = 0
    STORE_FLOAT = 1
    ADD = 2
    GATED_SILU = 3
    GATED_GELU = 4
    GELU = 5
    GATED_CLAMPED = 6
    GATED_GELU_ERF = 7
    GELU_ERF = 8
    RELU = 9
    SILU = 10


class KvHeads(Structure):
    _fields_ = (("num_kv_heads", c_int64), ("head_dim", c_int64), ("rotary_dim", c_int64))


class Shape(Structure):
    _fields_ = (
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("rotary_dim", c_int64),
        ("other", KvHeads),
        ("hidden", c_int64),
        ("num_heads", c_int64),
        ("num_gates", c_int64),
        ("page_size", c_int64),
        ("act_bf16", c_int64),
        ("cache_form", c_int64),
        ("uses_tiles", c_int64),
        ("rope_width", c_int64),
        ("norm_kind", c_int64),
        ("qk_norm_scope", c_int64),
        ("eps", c_float),
        ("score_scale", c_float),
        ("scores_softcap", c_float),
        ("logits_softcap", c_float),
        ("embedding_scale", c_float),
        ("gate_alpha", c_float),
        ("gate_limit", c_float),
    )


class Codebook(IntEnum):
    """The meaning of a weight's 4 bits."""

    INTEGERS = 0
    E2M1 = 1
    IQ4 = 2


class Minima(IntEnum):
    """The second factor of a group of weights."""

    NONE = 0
    HALF = 1
    ZERO_POINTS = 2


class AdapterPart(Structure):
    _fields_ = (
        ("up", c_void_p),
        ("first_output", c_int64),
        ("end_output", c_int64),
        ("first_rank", c_int64),
        ("num_ranks", c_int64),
    )


MAX_ADAPTER_PARTS = 4


class Adapter(Structure):
    _fields_ = (
        ("down", c_void_p),
        ("num_ranks", c_int64),
        ("num_parts", c_int64),
        ("parts", AdapterPart * MAX_ADAPTER_PARTS),
    )


class Packing(Structure):
    """How the numbers of a weight are stored; all 0 for floats."""

    _fields_ = (
        ("bits", c_int64),
        ("codebook", c_int64),
        ("group_size", c_int64),
        ("block_size", c_int64),
        ("minima", c_int64),
    )


class WeightPart(Structure):
    _fields_ = (("packed", c_void_p), ("end_panel", c_int64), ("packing", Packing))


MAX_WEIGHT_PARTS = 3
PANEL = 64
"""Outputs of a panel; of a gated pair, half of each."""
UNIT = 32
"""Inputs of a unit of quantised weights."""


class Linear(Structure):
    _fields_ = (
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("gated", c_int64),
        ("scales_whole_rows", c_int64),
        ("num_parts", c_int64),
        ("parts", WeightPart * MAX_WEIGHT_PARTS),
        ("adapters", c_void_p),
        ("most_ranks", c_int64),
        ("scale", c_float),
    )


class Experts(Structure):
    _fields_ = (
        ("gate_up", Linear),
        ("down", Linear),
        ("gate_up_bytes", c_int64),
        ("down_bytes", c_int64),
        ("count", c_int64),
        ("per_token", c_int64),
        ("normalises", c_int64),
        ("factors", c_void_p),
    )


class Attention(Structure):
    _fields_ = (
        ("cache", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("v_norm", c_void_p),
        ("sinks", c_void_p),
        ("window", c_int64),
        ("first_key", c_int64),
        ("query_rope", c_int64),
        ("key_rope", c_int64),
        ("group", c_int64),
        ("page_bytes", c_int64),
        ("has_other_heads", c_int64),
        ("stores", c_int64),
        ("sees_ahead", c_int64),
    )


class LayerInputs(Structure):
    _fields_ = (
        ("table", c_void_p),
        ("is_packed", c_int64),
        ("norm", c_void_p),
        ("width", c_int64),
        ("num_layers", c_int64),
        ("num_ids", c_int64),
        ("scale", c_float),
    )


class DeltaNet(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("conv", "bias", "decays", "norm", "states", "inputs", "gates", "mixed")),
        ("first_spare", c_int64),
        ("key_heads", c_int64),
        ("value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("width", c_int64),
        ("tiles_key_heads", c_int64),
    )


class Streams(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("router", "predictions", "corrections", "scale", "rows")),
        ("count", c_int64),
    )


class StepRows(Structure):
    _fields_ = (
        ("arrays", c_void_p),
        ("rope", c_void_p),
        ("num_tokens", c_int64),
        ("num_rows", c_int64),
        ("num_groups", c_int64),
        ("table_width", c_int64),
        ("num_logit_rows", c_int64),
        ("num_verified", c_int64),
        ("num_scored", c_int64),
        ("has_adapters", c_int64),
        ("has_turns", c_int64),
        ("has_ends", c_int64),
    )


class ScoredRows(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("next_ids", c_void_p),
        ("num_rows", c_int64),
        ("vocab", c_int64),
        ("num_top", c_int64),
        ("chosen", c_void_p),
        ("ranks", c_void_p),
        ("top_ids", c_void_p),
        ("top", c_void_p),
    )


class ScoredBlocks:
    """The arrays into which the kernels write log probabilities of scored tokens.

    `logprobs` is complete when they have scored the rows of all blocks.
    """

    def __init__(self, scored: ScoredTokens, vocab_size: int) -> None:
        count, self._vocab_size = len(scored.tokens), vocab_size
        self._num_top = min(scored.num_top, vocab_size)
        self._next_ids = np.ascontiguousarray(scored.next_ids, np.int32)
        self.logprobs = TokenLogprobs(
            rows=np.arange(count, dtype=np.int32),
            chosen=np.empty(count, np.float32),
            ranks=np.empty(count, np.int32),
            top_ids=np.zeros((count, self._num_top), np.int32),
            top=np.zeros((count, self._num_top), np.float32),
        )

    def cut(self, first: int, num_rows: int, logits: int) -> ScoredRows:
        """Rows from `first` on, at most num_rows. logits is the address at which theirs begin."""
        part, out = slice(first, first + num_rows), self.logprobs
        next_ids = self._next_ids[part]
        return ScoredRows(
            logits=logits,
            next_ids=next_ids.ctypes.data,
            num_rows=len(next_ids),
            vocab=self._vocab_size,
            num_top=self._num_top,
            chosen=out.chosen[part].ctypes.data,
            ranks=out.ranks[part].ctypes.data,
            top_ids=out.top_ids[part].ctypes.data,
            top=out.top[part].ctypes.data,
        )


class Operation(Structure):
    _fields_ = (("kind", c_int64), ("weights", c_void_p), ("x", c_void_p), ("out", c_void_p), ("form", c_int64))


class OperationTime(Structure):
    _fields_ = (("elapsed_ns", c_int64), ("idle_ns", c_int64))


_P, _N = c_void_p, c_int64
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ps_create": (c_void_p, (c_int, _N, _P)),
    "ps_destroy": (None, (_P,)),
    "ps_set_cache": (None, (_P, _N, _N)),
    "ps_packed_bytes": (c_int64, (_P, _P)),
    "ps_part_bytes": (c_int64, (_P, _P, _N)),
    "ps_pack": (None, (_P, _P, _P)),
    "ps_pack_quantized": (None, (_P, _P, _N, _P, _N, _P, _P)),
    "ps_pack_blocks": (None, (_P, _P, _N, _N, _P)),
    "ps_wake": (None, (_P,)),
    "ps_plan": (None, (_P, _P)),
    "ps_run": (None, (_P, _P, _N, _P)),
    "ps_score": (None, (_P, _P, _N, _P)),
    "ps_sample": (None, (_P, _P)),
    "ps_read_memory": (c_float, (_P, _P, _N)),
}


def declare_functions(library: CDLL, signatures: dict[str, tuple[Any, tuple[Any, ...]]] = _SIGNATURES) -> None:
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def make_shape(config: DecoderConfig, dtype: Dtype, *, uses_tiles: bool) -> Shape:
    """Make the shape without a cache; `create_cache` sets the cache's size and form."""
    gate = None if config.experts is None else config.experts.clamped_gate
    usual = config.rope if config.full_heads is None else config.window_rope or config.rope
    other = (0, 0, 0) if config.full_heads is None else (*config.full_heads, config.rope.rotary_dim)
    return Shape(
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        num_gates=config.num_heads if config.gated_attention else 0,
        head_dim=config.head_dim,
        rotary_dim=usual.rotary_dim,
        other=KvHeads(*other),
        page_size=16,
        act_bf16=dtype is Dtype.BF16,
        cache_form=CACHE_FORMS["fp32"],
        uses_tiles=uses_tiles,
        rope_width=sum(rope.rotary_dim for rope in config.ropes),
        norm_kind=NORM_KINDS[config.norm],
        qk_norm_scope=QK_NORM_SCOPES[config.qk_norm or "head"],
        eps=config.norm_eps,
        score_scale=config.score_scale,
        scores_softcap=config.scales.scores_softcap or 0.0,
        logits_softcap=config.scales.logits_softcap or 0.0,
        embedding_scale=dtype.round(config.scales.embedding),
        gate_alpha=0.0 if gate is None else gate.alpha,
        gate_limit=0.0 if gate is None else gate.limit,
    )
