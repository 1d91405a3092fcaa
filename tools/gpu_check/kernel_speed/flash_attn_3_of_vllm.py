"""FlashAttention 3's Python functions over the operator in vLLM's wheel: `pack_peers` copies this file beside it.

The wheel's operator is built for torch's stable ABI, so it loads into another torch than vLLM's; its own Python module
needs the rest of vLLM. Here are only the functions and arguments that the check, transformers and nano-vllm use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

_LIBRARY = Path(__file__).with_name("_vllm_fa3_C.abi3.so")
_SET = {"window_size_left": -1, "window_size_right": -1, "cp_world_size": 1}
"""Arguments whose neutral value is not 0."""

if _LIBRARY.exists():  # in the archive, not in this package
    torch.ops.load_library(str(_LIBRARY))  # type: ignore[no-untyped-call]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False
) -> Tensor:
    """q [rows, tokens, heads, dim]; k and v have as many rows, and fewer heads or equally many.

    vLLM builds the kernels for rows back to back alone.
    """
    starts = [
        torch.arange(0, x.shape[0] * x.shape[1] + 1, x.shape[1], dtype=torch.int32, device=x.device) for x in (q, k)
    ]
    query_starts, key_starts = starts
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    out = flash_attn_varlen_func(
        flat_q, flat_k, flat_v, query_starts, key_starts, q.shape[1], k.shape[1], softmax_scale, causal
    )
    return out.view_as(q)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    **ignored: Any,
) -> Tensor:
    """q [tokens, heads, dim], rows back to back. With a block_table k and v are pages [pages, page tokens, heads, dim],
    and seqused_k has the rows' lengths."""
    _require_no(ignored)
    if block_table is not None and seqused_k is None and cu_seqlens_k is not None:
        seqused_k, cu_seqlens_k = torch.diff(cu_seqlens_k).int(), None
    return _attend(
        q, softmax_scale, k=k, v=v, is_causal=causal, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, page_table=block_table,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    **ignored: Any,
) -> Tensor:
    """q [rows, tokens, heads, dim], or [tokens, heads, dim] with cu_seqlens_q and max_seqlen_q; cache_seqlens int32
    [rows]; k and v, if given, are stored behind them first."""
    _require_no(ignored)
    table = page_table if page_table is not None else block_table
    return _attend(
        q, softmax_scale, k=k_cache, v=v_cache, k_new=k, v_new=v, seqused_k=cache_seqlens, page_table=table,
        is_causal=causal, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
    )  # fmt: skip


def _attend(q: Tensor, softmax_scale: float | None, **given: Any) -> Tensor:
    """Call the operator with neutral values for all arguments that are not given: its schema has no defaults."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    given |= {"q": q.contiguous(), "softmax_scale": scale}
    operator = torch.ops._vllm_fa3_C.fwd.default
    arguments = {argument.name: _neutral(argument) for argument in operator._schema.arguments} | _SET | given
    out: Tensor = operator(**arguments)[0]
    return out


def _neutral(argument: Any) -> object:
    kind = str(argument.type)
    if kind.startswith("Optional"):
        return None
    neutral: dict[str, object] = {"bool": False, "int": 0, "float": 0.0}
    return neutral.get(kind)


def _require_no(ignored: dict[str, Any]) -> None:
    """Accept further arguments only if they ask for nothing."""
    neutral = (None, False, 0, 0.0, (-1, -1), [-1, -1])
    asked = [name for name, value in ignored.items() if isinstance(value, torch.Tensor) or value not in neutral]
    if asked:
        raise TypeError(f"{', '.join(asked)}: not supported by this wrapper of vLLM's FlashAttention 3")
