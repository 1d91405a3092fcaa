"""The KV budget as a contract: from bytes to pages, and what a single sequence may then hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.errors import StartupError
from shm.cli import format_size

if TYPE_CHECKING:
    from backend.forward_pass import PassSpec


@dataclass(frozen=True, slots=True)
class KvPlan:
    """num_pages * page_size_tokens * bytes_per_token is at most the budget."""

    kv_dtype: str
    bytes_per_token: int
    page_size_tokens: int
    num_pages: int
    max_context_tokens: int
    budget_bytes: int
    weight_bytes: int

    @property
    def max_pages_per_sequence(self) -> int:
        return -(-self.max_context_tokens // self.page_size_tokens)

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size_tokens

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.bytes_per_token

    def describe(self) -> str:
        return (
            f"KV cache: {self.kv_dtype}, {self.bytes_per_token} bytes per token, {self.num_pages} pages of "
            f"{self.page_size_tokens} tokens = {self.num_tokens} tokens in {format_size(self.num_bytes)}; "
            f"contexts up to {self.max_context_tokens} tokens"
        )

    def rows(self) -> list[tuple[str, str]]:
        """What `--dry-run` prints: names and values."""
        return [
            ("weights", format_size(self.weight_bytes)),
            ("KV budget", format_size(self.budget_bytes)),
            ("KV dtype", self.kv_dtype),
            ("KV bytes per token", f"{self.bytes_per_token:,}"),
            ("tokens per page", f"{self.page_size_tokens:,}"),
            ("pages", f"{self.num_pages:,}"),
            ("tokens", f"{self.num_tokens:,}"),
            ("KV cache", format_size(self.num_bytes)),
            ("longest sequence", f"{self.max_context_tokens:,} tokens"),
            ("sequences of that length", f"{self.num_pages // self.max_pages_per_sequence:,}"),
        ]


def plan_kv(
    spec: PassSpec,
    *,
    budget_bytes: int,
    kv_dtype: str,
    page_size_tokens: int,
    max_context_tokens: int | None,
    max_running: int,
) -> KvPlan:
    """Pages for the budget, no more than max_running full contexts can use.

    kv_dtype "auto" is the first of the pass's whose pages hold what is asked for: max_running sequences of
    max_context_tokens where that is given, one of the model's full context where it is not; the narrowest if none does.
    Raises StartupError naming the value, the limit and the remedy.
    """
    if kv_dtype != "auto" and kv_dtype not in spec.kv_bytes_per_token:
        raise StartupError(f"--kv-dtype is {kv_dtype}; this forward pass has {', '.join(spec.kv_bytes_per_token)}")
    if max_context_tokens is not None and max_context_tokens > spec.max_context_tokens:
        raise StartupError(f"--max-context is {max_context_tokens}; the model was made for {spec.max_context_tokens}")
    wanted_tokens = max_context_tokens * max_running if max_context_tokens is not None else spec.max_context_tokens
    if kv_dtype == "auto":
        fitting = [
            name
            for name, num_bytes in spec.kv_bytes_per_token.items()
            if _num_pages(budget_bytes, num_bytes, page_size_tokens) * page_size_tokens >= wanted_tokens
        ]
        kv_dtype = fitting[0] if fitting else min(spec.kv_bytes_per_token, key=spec.kv_bytes_per_token.__getitem__)
    bytes_per_token = spec.kv_bytes_per_token[kv_dtype]
    num_pages = _num_pages(budget_bytes, bytes_per_token, page_size_tokens)
    if num_pages < 1:
        raise StartupError(
            f"--kv-budget is {format_size(budget_bytes)}; one page of {page_size_tokens} tokens takes "
            f"{format_size(bytes_per_token * page_size_tokens)}: raise the budget or lower --page-size"
        )
    if max_context_tokens is not None and max_context_tokens > num_pages * page_size_tokens:
        raise StartupError(
            f"--max-context is {max_context_tokens}; --kv-budget {format_size(budget_bytes)} holds "
            f"{num_pages * page_size_tokens} tokens: raise the budget or lower --max-context"
        )
    context = min(max_context_tokens or spec.max_context_tokens, num_pages * page_size_tokens)
    num_pages = min(num_pages, max_running * -(-context // page_size_tokens))
    return KvPlan(kv_dtype, bytes_per_token, page_size_tokens, num_pages, context, budget_bytes, spec.weight_bytes)


def _num_pages(budget_bytes: int, bytes_per_token: int, page_size_tokens: int) -> int:
    return budget_bytes // (bytes_per_token * page_size_tokens)
