"""The KV budget: from bytes to pages, and to the longest sequence that they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassSpec
from penstock.backend.kv_cache.budget.memory import MemoryInfo
from penstock.backend.kv_cache.budget.whole_plan import check_context
from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.process.options import format_size

CPU_BUDGET_BYTES = 2_000_000_000
"""CPU default; memory is shared with other programs."""
MAX_PAGES = 1 << 22
"""The engine's own records of pages are not in the budget; for this many they take about 0.2 GB."""
MAX_PAGE_TABLE = 1 << 28
"""Entries of 4 bytes, for all sequences that may run."""
_MIN_CONTEXT_TOKENS = 2
"""One token of the prompt and one of the answer."""
AUTO_HOST_BYTES = 4_000_000_000
"""Default for evicted pages in host memory when the model runs on a GPU: 30,000 tokens of a Llama 8B in bf16."""
_HOST_SHARE = 4
_CHECKPOINT_SHARE = 4
"""A quarter of what the states of running sequences leave is for checkpoints. One takes as much as the KV of some 1,600
tokens of Qwen3.5, and spares computing these."""
_RESERVE_SHARE = 10
_MIN_RESERVE_BYTES = 512_000_000


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Bytes for the KV cache and the state of all slots.

    auto_parts are the numbers behind an "auto" budget; empty if the operator gave the budget.
    """

    num_bytes: int
    auto_parts: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        if not self.auto_parts:
            return format_size(self.num_bytes)
        (free, free_bytes), *taken = self.auto_parts
        less = ", ".join(f"{format_size(num_bytes)} {name}" for name, num_bytes in taken)
        return f"auto, {format_size(self.num_bytes)} ({format_size(free_bytes)} {free} less {less})"

    @property
    def remedy(self) -> str:
        return "free some memory, name a budget" if self.auto_parts else "raise the budget"


def auto_budget(spec: PassSpec, memory: MemoryInfo) -> KvBudget:
    """Free memory minus the pass's own and a reserve: a tenth of all memory, at least 512 MB."""
    reserve_bytes = max(memory.total_bytes // _RESERVE_SHARE, _MIN_RESERVE_BYTES)
    taken = [("for the weights", spec.weight_bytes), ("in reserve", reserve_bytes)]
    if spec.workspace_bytes:
        taken.insert(1, ("for the steps", spec.workspace_bytes))
    left_bytes = memory.free_bytes - sum(num_bytes for _, num_bytes in taken)
    return KvBudget(max(0, left_bytes), ((f"free on {memory.name}", memory.free_bytes), *taken))


def host_budget(requested: int | Literal["auto"], device: str, memory: MemoryInfo) -> int:
    """--host-kv-budget in bytes. device is `PassOptions.device`; memory is the host's. Raises StartupError."""
    if requested == "auto":
        return 0 if device == "cpu" else min(AUTO_HOST_BYTES, memory.free_bytes // _HOST_SHARE)
    if requested and device == "cpu":
        raise StartupError(
            f"--host-kv-budget is {format_size(requested)}; the model runs on the CPU, whose KV cache is in the host's "
            "memory already: raise --kv-budget instead"
        )
    return requested


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """The whole pages that a budget holds in one KV dtype; at most MAX_PAGES."""

    kv_dtype: str
    bytes_per_token: int
    """Over all layers, and thus over all groups of layers."""
    groups: KvGroups
    num_pages: int
    """All groups share them."""

    @property
    def page_size_tokens(self) -> int:
        return self.groups.page_size_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens with a page of each group; more fit where windows pass."""
        return self.num_pages // self.groups.count * self.page_size_tokens

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def page_bytes(self) -> int:
        return self.page_size_tokens * self.bytes_per_token // self.groups.count


@dataclass(frozen=True, slots=True)
class KvDtypeChoice:
    """The capacity in each KV dtype that was tried, in order; the last one is used."""

    tried: tuple[KvCapacity, ...]
    is_auto: bool
    full_context_tokens: int
    """--max-context, or the model's own."""
    held_tokens: int
    """The room that a sequence of that length takes: all of it, or only its windows' part."""
    needed_tokens: int
    needed_for: str

    @property
    def chosen(self) -> KvCapacity:
        return self.tried[-1]

    @property
    def reason(self) -> str:
        if not self.is_auto:
            return f"--kv-dtype is {self.chosen.kv_dtype}"
        needed = f"{self.needed_tokens:,} tokens ({self.needed_for})"
        if self.chosen.num_tokens < self.needed_tokens:
            return f"None holds {needed}; {self.chosen.kv_dtype} is the narrowest"
        return f"{self.chosen.kv_dtype} is the first that holds {needed}"


@dataclass(frozen=True, slots=True)
class KvPlan(KvCapacity):
    """The pages planned for a budget: at most its capacity, and at most the need of max_running full contexts."""

    max_context_tokens: int
    max_running: int
    weight_bytes: int
    workspace_bytes: int
    state_bytes: int
    """State of all slots; a part of the budget."""
    graph_bytes: int
    """A part of workspace_bytes."""
    budget: KvBudget
    choice: KvDtypeChoice
    picture_bytes: int = 0
    """A part of weight_bytes and workspace_bytes."""
    quantization: str = "none"
    """How the weights are quantised."""
    num_checkpoints: int = 0
    """States beside those of all slots; a part of the budget."""

    @property
    def checkpoint_bytes(self) -> int:
        return self.num_checkpoints * (self.state_bytes // self.max_running)

    @property
    def max_pages_per_sequence(self) -> int:
        """Entries of the page table for all groups."""
        return self.groups.pages_for(self.max_context_tokens)

    @property
    def num_longest_sequences(self) -> int:
        """Number of sequences of max_context_tokens that the pages hold at a time."""
        return self.num_pages // self.groups.most_pages(self.max_context_tokens)

    @property
    def device_bytes(self) -> int:
        """All device memory that the backend takes."""
        return self._cache_bytes + self.weight_bytes + self.workspace_bytes

    @property
    def _cache_bytes(self) -> int:
        return self.num_bytes + self.state_bytes + self.checkpoint_bytes

    @property
    def parts(self) -> str:
        """The uses of the memory, for messages."""
        return (
            f"a KV cache of {format_size(self._cache_bytes)}, weights of "
            f"{format_size(self.weight_bytes)} and a workspace of {format_size(self.workspace_bytes)}"
        )

    @property
    def remedy(self) -> str:
        return "lower --kv-budget"

    @property
    def narrowing(self) -> str | None:
        """A warning if a small budget has narrowed the cache, which changes tokens."""
        wanted, choice = self.choice.tried[0], self.choice
        if wanted is choice.chosen:
            return None
        wide = wanted.kv_dtype
        return (
            f"--kv-dtype auto takes {self.kv_dtype}, because a KV cache in {wide} holds "
            f"{wanted.num_tokens:,} of {choice.needed_tokens:,} tokens ({choice.needed_for}) in {self.budget}: "
            f"tokens may differ from those of {wide}. --kv-dtype {wide} or a larger --kv-budget avoids that"
        )

    @property
    def is_capped(self) -> bool:
        """The budget holds more than max_running sequences of the longest kind can use."""
        return self.num_pages < self.choice.chosen.num_pages

    def describe(self) -> str:
        """One line for the log."""
        kind = "" if self.quantization == "none" else f"{self.quantization} "
        weights = f"{kind}weights: {format_size(self.weight_bytes)}; " if self.weight_bytes else ""
        states = f"state of {self.max_running} sequences: {format_size(self.state_bytes)}; " if self.state_bytes else ""
        if self.num_checkpoints:
            states += f"{self.num_checkpoints} checkpoints of states: {format_size(self.checkpoint_bytes)}; "
        return (
            f"{weights}{states}KV cache: {self.kv_dtype}, {self.bytes_per_token} bytes per token, {self.num_pages} "
            f"pages of {self.page_size_tokens} tokens = {self.num_tokens} tokens in {format_size(self.num_bytes)}; "
            f"contexts up to {self.max_context_tokens} tokens; budget {self.budget}"
        )


def plan_kv(
    spec: PassSpec,
    *,
    budget: KvBudget,
    kv_dtype: str,
    groups: KvGroups,
    max_context_tokens: int | None,
    max_running: int,
) -> KvPlan:
    """Plan the pages of a budget: at most what max_running full contexts use. The state of max_running sequences comes
    first, then checkpoints, unless the longest sequence needs their memory.

    kv_dtype "auto" takes the first of the pass's dtypes that holds enough tokens, or the narrowest if none does. Enough
    is max_running sequences of max_context_tokens if that is given, otherwise one sequence of the model's full context.
    Raises StartupError naming the value, the limit and the remedy.
    """
    check_context(spec, max_context_tokens)
    _check_page_size(spec, groups.page_size_tokens)
    state_bytes = max_running * spec.state_bytes_per_sequence
    page_bytes = budget.num_bytes - state_bytes
    if page_bytes < 0:
        raise StartupError(
            f"--kv-budget is {budget}; the state of --max-running {max_running} sequences takes "
            f"{format_size(state_bytes)}: {budget.remedy} or lower --max-running"
        )
    most_checkpoints = spec.copies_states * page_bytes // _CHECKPOINT_SHARE // max(1, spec.state_bytes_per_sequence)
    for num_checkpoints in (most_checkpoints, 0):
        left_bytes = page_bytes - num_checkpoints * spec.state_bytes_per_sequence
        choice = _choose_dtype(spec, left_bytes, kv_dtype, groups, max_context_tokens, max_running)
        capacity = choice.chosen
        context = groups.longest_sequence(capacity.num_pages, max_context_tokens or spec.max_context_tokens)
        if context >= (least_context := max_context_tokens or _MIN_CONTEXT_TOKENS):
            break
    if capacity.num_pages < 1:
        raise StartupError(
            f"--kv-budget is {budget}; one page of {groups.page_size_tokens} tokens takes "
            f"{format_size(capacity.page_bytes)}: {budget.remedy} or lower --page-size"
        )
    if context < least_context:
        raise StartupError(
            f"--max-context is {least_context}; --kv-budget {budget} holds {capacity.num_tokens} tokens: "
            f"{budget.remedy} or lower --max-context"
        )
    pages_per_sequence = groups.pages_for(context)
    most_running = MAX_PAGE_TABLE // pages_per_sequence
    if max_running > most_running:
        raise StartupError(
            f"--max-running is {max_running}; at most {most_running} sequences of {pages_per_sequence} pages can run: "
            "lower --max-running or --max-context, or raise --page-size"
        )
    return KvPlan(
        kv_dtype=capacity.kv_dtype,
        bytes_per_token=capacity.bytes_per_token,
        groups=groups,
        num_pages=min(capacity.num_pages, max_running * groups.most_pages(context)),
        max_context_tokens=context,
        max_running=max_running,
        weight_bytes=spec.weight_bytes,
        workspace_bytes=spec.workspace_bytes,
        state_bytes=state_bytes,
        graph_bytes=spec.graph_bytes,
        budget=budget,
        choice=choice,
        picture_bytes=spec.picture_bytes,
        quantization=spec.quantization,
        num_checkpoints=num_checkpoints,
    )


def _check_page_size(spec: PassSpec, page_size_tokens: int) -> None:
    if spec.page_sizes and page_size_tokens not in spec.page_sizes:
        offered = ", ".join(map(str, spec.page_sizes))
        raise StartupError(f"--page-size is {page_size_tokens}; this forward pass supports {offered}: use one of these")


def _choose_dtype(
    spec: PassSpec,
    num_bytes: int,
    kv_dtype: str,
    groups: KvGroups,
    max_context_tokens: int | None,
    max_running: int,
) -> KvDtypeChoice:
    """Choose the KV dtype for `plan_kv`. Skips dtypes that are no narrower than one that held too little.

    Raises StartupError.
    """
    full_context_tokens = max_context_tokens or spec.max_context_tokens
    held_tokens, set_tokens = groups.most_tokens(full_context_tokens), groups.page_size_tokens
    offered = {
        name: KvCapacity(name, size, groups, min(groups.count * num_bytes // (size * set_tokens), MAX_PAGES))
        for name, size in spec.kv_bytes_per_token.items()
    }
    if max_context_tokens is None:
        needed = (full_context_tokens, held_tokens, held_tokens, "one full context")
    else:
        needed = (full_context_tokens, held_tokens, held_tokens * max_running, "--max-context times --max-running")
    if kv_dtype != "auto":
        if kv_dtype not in offered:
            raise StartupError(
                f"--kv-dtype is {kv_dtype}; this forward pass has {', '.join(offered)}: use one of these, or auto"
            )
        return KvDtypeChoice((offered[kv_dtype],), False, *needed)
    tried: list[KvCapacity] = []
    for capacity in offered.values():
        if tried and capacity.bytes_per_token >= tried[-1].bytes_per_token:
            continue
        tried.append(capacity)
        if capacity.num_tokens >= needed[2]:
            break
    return KvDtypeChoice(tuple(tried), True, *needed)
