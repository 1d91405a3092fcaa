"""The attention function that transformers' models call in place of their own, over the paged cache.

transformers passes it the new queries, keys and values of a layer, after rotary embedding (its `AttentionInterface`,
https://huggingface.co/docs/transformers/attention_interface). All rows of a step are one sequence to the model, with
their own position ids; only here they are kept apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from penstock.backend.passes.cpu.in_torch.paged_cache import KvShape, PagedStep, ScoreRule, attend

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
    """The arguments of a layer's attention function. Tensors are [T, heads, head_dim]."""

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    window_tokens: int | None
    """A token attends to itself and the window - 1 tokens before it."""
    rule: ScoreRule


class Attention(Protocol):
    def __call__(self, call: LayerCall) -> Tensor:
        """Return [T, heads, value_dim]."""


class UnsupportedAttentionError(Exception):
    """The model asks its attention function for something that this one does not support."""


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
    attention_mask: Tensor | None,  # noqa: ARG001 - some models pass it by name
    **arguments: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, head_dim], key and value [1, kv_heads, T, …] → contiguous [1, T, heads, value_dim]."""
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
        window_tokens=arguments.get("sliding_window"),
        rule=ScoreRule(
            query.shape[-1] ** -0.5 if scale is None else float(scale),
            arguments.get("softcap"),
            arguments.get("s_aux"),
        ),
    )
    return _CURRENT.get()(call).unsqueeze(0).contiguous(), None


@dataclass(slots=True)
class ShapeProbe:
    """Plain causal attention over one sequence, which notes what the layers pass."""

    kv_shapes: dict[int, KvShape] = field(default_factory=dict)
    """By layer."""

    def __call__(self, call: LayerCall) -> Tensor:
        if call.layer in self.kv_shapes:
            raise UnsupportedAttentionError(f"layer {call.layer} attends more than once")
        self.kv_shapes[call.layer] = KvShape(call.keys.shape[1], call.keys.shape[2], call.values.shape[2])
        positions = torch.arange(len(call.keys), device=call.keys.device)
        distance = positions[:, None] - positions
        visible = distance >= 0
        if call.window_tokens is not None:
            visible &= distance < call.window_tokens
        keys, values = (states.transpose(0, 1).unsqueeze(1).float() for states in (call.keys, call.values))
        attended = attend(call.queries.unsqueeze(0), keys, values, visible.unsqueeze(0), call.rule)
        return attended[0].to(call.queries.dtype)


def paged_attention(step: PagedStep) -> Attention:
    """Attention over the cache, for one step."""

    def attention(call: LayerCall) -> Tensor:
        step.store(call.layer, call.keys, call.values)
        return step.attend(call.layer, call.queries, call.window_tokens, call.rule)

    return attention
