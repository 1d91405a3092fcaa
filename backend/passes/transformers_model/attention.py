"""The attention function that transformers' models call in place of their own, over the paged cache.

transformers passes it the new queries, keys and values of a layer, after rotary embedding (its `AttentionInterface`,
https://huggingface.co/docs/transformers/attention_interface). All rows of a step are one sequence to the model, with
their own position ids; only here they are kept apart.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Module

NAME = "penstock_paged"
"""The attention function's name in transformers."""

_USED = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
_HARMLESS = frozenset(
    {
        *("dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "layer_idx"),
        *("output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep", "head_mask", "training"),
    }
)
"""Arguments without an effect on inference of a causal model."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer passes to its attention function. Tensors are [T, heads, head_dim]."""

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    window_tokens: int | None
    """A token attends to itself and the window - 1 tokens before it."""
    softcap: float | None
    """Scores become softcap · tanh(scores / softcap)."""
    sinks: Tensor | None
    """[heads] a score for each head that takes part in the softmax and has no value (gpt-oss)."""


class Attention(Protocol):
    def __call__(self, call: LayerCall) -> Tensor:
        """Return [T, heads, value_dim]."""
        ...


class UnsupportedAttentionError(Exception):
    """The model asks its attention function for something that this one does not do."""


_CURRENT: ContextVar[Attention] = ContextVar("penstock_attention")


@contextmanager
def attention_by(attention: Attention) -> Iterator[None]:
    """Within the context, models loaded with `NAME` use this attention."""
    token = _CURRENT.set(attention)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def register() -> None:
    """Make `NAME` known to transformers. It has no mask function: masks would be of [T, T]."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _interface)


def _interface(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, head_dim], key and value [1, kv_heads, T, …] → [1, T, heads, value_dim]."""
    unknown = [name for name in arguments.keys() - _USED - _HARMLESS if arguments[name] is not None]
    if unknown:
        raise UnsupportedAttentionError(f"its attention takes {', '.join(sorted(unknown))}")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedAttentionError(f"its {type(module).__name__} has no layer_idx")
    scale = arguments.get("scaling")
    call = LayerCall(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window_tokens=arguments.get("sliding_window"),
        softcap=arguments.get("softcap"),
        sinks=arguments.get("s_aux"),
    )
    return _CURRENT.get()(call).unsqueeze(0), None


@dataclass(slots=True)
class ShapeProbe:
    """Plain causal attention over one sequence, which notes what the layers pass."""

    kv_shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Layer → (kv_heads, key_dim, value_dim)."""
    windows: dict[int, int | None] = field(default_factory=dict)

    def __call__(self, call: LayerCall) -> Tensor:
        if call.layer in self.kv_shapes:
            raise UnsupportedAttentionError(f"layer {call.layer} attends more than once")
        self.kv_shapes[call.layer] = (*call.keys.shape[1:], call.values.shape[2])
        self.windows[call.layer] = call.window_tokens
        positions = torch.arange(len(call.keys))
        distance = positions[:, None] - positions
        visible = distance >= 0
        if call.window_tokens is not None:
            visible &= distance < call.window_tokens
        keys, values = (states.transpose(0, 1).unsqueeze(1).float() for states in (call.keys, call.values))
        attended = attend(call, call.queries.unsqueeze(0), keys, values, visible.unsqueeze(0))
        return attended[0].to(call.queries.dtype)


def attend(call: LayerCall, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention of n groups of w queries, each over K keys of its own: [n, w, heads, value_dim] fp32.

    queries [n, w, heads, key_dim]; keys [kv_heads, n, K, key_dim] and values [kv_heads, n, K, value_dim], fp32; visible
    [n, w, K] says which key a query sees. Of the call, scale, softcap and sinks apply.
    """
    kv_heads, (num, width, heads, _) = keys.shape[0], queries.shape
    group = heads // kv_heads
    q = queries.float().view(num, width, kv_heads, group, -1).permute(2, 0, 3, 1, 4).flatten(2, 3)
    scores = torch.matmul(q, keys.transpose(2, 3)).mul_(call.scale).view(kv_heads, num, group, width, -1)
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if call.sinks is not None:
        sinks = call.sinks.float().view(kv_heads, 1, group, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]].flatten(2, 3)
    attended = torch.matmul(weights, values).view(kv_heads, num, group, width, -1)
    return attended.permute(1, 3, 0, 2, 4).flatten(2, 3)
