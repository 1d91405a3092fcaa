"""The KV budget as a contract: from bytes to pages, and what a single sequence may then hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.errors import StartupError
from shm.cli import format_size

if TYPE_CHECKING:
    from backend.forward_pass import IBatchedForwardPass


@dataclass(frozen=True, slots=True)
class KvPlan:
    """num_pages * page_size_tokens * bytes_per_token is at most the budget."""

    kv_dtype: str
    bytes_per_token: int
    page_size_tokens: int
    num_pages: int
    max_context_tokens: int

    @property
    def max_pages_per_sequence(self) -> int:
        return -(-self.max_context_tokens // self.page_size_tokens)

    def describe(self) -> str:
        tokens = self.num_pages * self.page_size_tokens
        return (
            f"KV cache: {self.kv_dtype}, {self.bytes_per_token} bytes per token, {self.num_pages} pages of "
            f"{self.page_size_tokens} tokens = {tokens} tokens in {format_size(tokens * self.bytes_per_token)}; "
            f"contexts up to {self.max_context_tokens} tokens"
        )


def plan_kv(
    forward_pass: IBatchedForwardPass,
    *,
    budget_bytes: int,
    kv_dtype: str,
    page_size_tokens: int,
    max_context_tokens: int | None,
    max_running: int,
) -> KvPlan:
    """Pages for the budget, no more than max_running full contexts can use.

    kv_dtype "auto" is the pass's first choice. Raises StartupError naming the value, the limit and the remedy.
    """
    spec = forward_pass.spec
    if kv_dtype == "auto":
        kv_dtype = spec.kv_dtypes[0]
    elif kv_dtype not in spec.kv_dtypes:
        raise StartupError(f"--kv-dtype is {kv_dtype}; this forward pass has {', '.join(spec.kv_dtypes)}")
    bytes_per_token = forward_pass.kv_bytes_per_token(kv_dtype)
    page_bytes = bytes_per_token * page_size_tokens
    num_pages = budget_bytes // page_bytes
    if num_pages < 1:
        raise StartupError(
            f"--kv-budget is {format_size(budget_bytes)}; one page of {page_size_tokens} tokens takes "
            f"{format_size(page_bytes)}: raise the budget or lower --page-size"
        )
    if max_context_tokens is not None and max_context_tokens > spec.max_context_tokens:
        raise StartupError(f"--max-context is {max_context_tokens}; the model was made for {spec.max_context_tokens}")
    if max_context_tokens is not None and max_context_tokens > num_pages * page_size_tokens:
        raise StartupError(
            f"--max-context is {max_context_tokens}; --kv-budget {format_size(budget_bytes)} holds "
            f"{num_pages * page_size_tokens} tokens: raise the budget or lower --max-context"
        )
    context = min(max_context_tokens or spec.max_context_tokens, num_pages * page_size_tokens)
    num_pages = min(num_pages, max_running * -(-context // page_size_tokens))
    return KvPlan(kv_dtype, bytes_per_token, page_size_tokens, num_pages, context)
