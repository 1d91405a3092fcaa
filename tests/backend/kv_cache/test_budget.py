from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassSpec
from penstock.backend.kv_cache.budget.budget_table import plan_rows, plan_tables
from penstock.backend.kv_cache.budget.kv_plan import MAX_PAGES, KvBudget, KvPlan, auto_budget, host_budget, plan_kv
from penstock.backend.kv_cache.budget.memory import MemoryInfo
from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.passes.fake import FakePass

BYTES_PER_TOKEN = 8
SPEC = PassSpec(100, 4096, {"bf16": 1000, "q8_0": 530, "fp32": 2000}, weight_bytes=3_000_000_000)
GB = 1_000_000_000


def plan(spec: PassSpec | None = None, **changes: Any) -> KvPlan:
    settings: dict[str, Any] = {
        "budget": 10_000,
        "kv_dtype": "auto",
        "page_size_tokens": 16,
        "max_context_tokens": None,
        "max_running": 64,
    } | changes
    if isinstance(settings["budget"], int):
        settings["budget"] = KvBudget(settings["budget"])
    spec, page_size = spec or FakePass(100, 4).spec, settings.pop("page_size_tokens")
    keeps_state = spec.state_bytes_per_sequence > 0
    groups = KvGroups.of(page_size, spec.kv_windows, 512, 1, keeps_state=keeps_state)
    return plan_kv(spec, groups=groups, **settings)


@given(st.integers(1, 10**7), st.integers(1, 512), st.integers(1, 100))
def test_plan_uses_every_page_that_fits_and_never_exceeds_the_budget(
    budget: int, page_size: int, max_running: int
) -> None:
    page_bytes = page_size * BYTES_PER_TOKEN
    if budget < max(page_bytes, 2 * BYTES_PER_TOKEN):
        with pytest.raises(StartupError, match="--kv-budget"):
            plan(budget=budget, page_size_tokens=page_size, max_running=max_running)
        return
    kv = plan(budget=budget, page_size_tokens=page_size, max_running=max_running)
    assert kv.num_pages * page_bytes <= budget
    assert kv.max_context_tokens <= kv.num_pages * page_size
    useful = max_running * kv.max_pages_per_sequence
    assert kv.num_pages == min(budget // page_bytes, useful)


AUTO = KvBudget(0, (("free on this machine", 3_100_000_000), ("for the weights", 3 * GB), ("in reserve", GB)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"budget": 100},
            "--kv-budget is 100 B; one page of 16 tokens takes 128 B: raise the budget or lower --page-size",
        ),
        (
            {"budget": AUTO},
            f"--kv-budget is {AUTO}; one page of 16 tokens takes 128 B: {AUTO.remedy} or lower --page-size",
        ),
        (
            {"budget": 8, "page_size_tokens": 1},
            "--max-context is 2; --kv-budget 8 B holds 1 tokens: raise the budget or lower --max-context",
        ),
        (
            {"max_context_tokens": 1 << 20},
            "--max-context is 1048576; the model supports at most 65536: lower --max-context",
        ),
        (
            {"max_context_tokens": 5000},
            "--max-context is 5000; --kv-budget 10.00 KB holds 1248 tokens: raise the budget or lower --max-context",
        ),
        (
            {"kv_dtype": "bf16"},
            "--kv-dtype is bf16; this forward pass has fp32: use one of these, or auto",
        ),
        (
            {"budget": 10 * GB, "page_size_tokens": 1, "max_running": 4097},
            "--max-running is 4097; at most 4096 sequences of 65536 pages can run: lower --max-running or",
        ),
    ],
)
def test_impossible_setting_is_refused_with_value_limit_and_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as refused:
        plan(**changes)
    assert str(refused.value).startswith(message)


def test_page_size_that_the_pass_does_not_support_is_refused() -> None:
    spec = PassSpec(100, 4096, {"bf16": 1}, page_sizes=(16, 32))
    assert plan(spec, page_size_tokens=32).page_size_tokens == 32
    with pytest.raises(StartupError, match="--page-size is 8; this forward pass supports 16, 32: use one of these"):
        plan(spec, page_size_tokens=8)


def test_auto_budget_shows_how_it_was_computed() -> None:
    parts = "3.10 GB free on this machine less 3.00 GB for the weights, 1.00 GB in reserve"
    assert str(AUTO) == f"auto, 0 B ({parts})"
    assert parts in plan(SPEC, budget=KvBudget(GB, AUTO.auto_parts)).describe()


def test_context_that_fits_is_kept() -> None:
    assert plan(max_context_tokens=600).max_context_tokens == 600


def test_number_of_pages_is_bounded() -> None:
    assert plan(budget=1 << 60, page_size_tokens=1, max_running=100).num_pages == MAX_PAGES


@pytest.mark.parametrize(
    ("budget", "context", "running", "tried", "reason"),
    [
        (4096 * 1000, None, 64, ["bf16"], "bf16 is the first that holds 4,096 tokens (one full context)"),
        (4095 * 1000, None, 64, ["bf16", "q8_0"], "q8_0 is the first that holds 4,096 tokens (one full context)"),
        (1000 * 1000, None, 64, ["bf16", "q8_0"], "None holds 4,096 tokens (one full context); q8_0 is the narrowest"),
        (GB, None, 64, ["bf16"], "bf16 is the first that holds 4,096 tokens (one full context)"),
        (
            GB,
            4096,
            64,
            ["bf16"],
            "bf16 is the first that holds 262,144 tokens (--max-context times --max-running)",
        ),
        (
            2 * 10**8,
            4096,
            64,
            ["bf16", "q8_0"],
            "q8_0 is the first that holds 262,144 tokens (--max-context times --max-running)",
        ),
    ],
)
def test_auto_takes_the_first_dtype_that_holds_the_context(
    budget: int, context: int | None, running: int, tried: list[str], reason: str
) -> None:
    kv = plan(SPEC, budget=budget, max_context_tokens=context, max_running=running)
    assert [capacity.kv_dtype for capacity in kv.choice.tried] == tried
    assert kv.kv_dtype == tried[-1]
    assert kv.choice.reason == reason
    assert kv.num_bytes <= budget
    assert (kv.narrowing is None) == (tried == ["bf16"])
    assert "--kv-dtype bf16 or a larger --kv-budget avoids that" in (kv.narrowing or "") or tried == ["bf16"]


def test_requested_dtype_is_taken_even_if_the_context_does_not_fit() -> None:
    kv = plan(SPEC, budget=10**6, kv_dtype="fp32")
    assert (kv.kv_dtype, kv.num_tokens) == ("fp32", 496)
    assert kv.choice.reason == "--kv-dtype is fp32"


@pytest.mark.parametrize(
    ("total", "free", "workspace", "left"),
    [
        (100 * GB, 60 * GB, 0, 60 * GB - 3 * GB - 10 * GB),
        (100 * GB, 60 * GB, 7, 60 * GB - 3 * GB - 10 * GB - 7),
        (4 * GB, 4 * GB, 0, 4 * GB - 3 * GB - 512_000_000),
        (4 * GB, 3 * GB, 0, 0),
    ],
)
def test_auto_budget_is_free_memory_minus_the_pass_and_a_reserve(
    total: int, free: int, workspace: int, left: int
) -> None:
    spec = PassSpec(100, 4096, {"fp32": 1}, weight_bytes=3 * GB, workspace_bytes=workspace)
    budget = auto_budget(spec, MemoryInfo(total, free, "GPU 0"))
    (first, first_bytes), *taken = budget.auto_parts
    assert budget.num_bytes == left
    assert (first, first_bytes) == ("free on GPU 0", free)
    assert max(0, free - sum(num_bytes for _, num_bytes in taken)) == left


@pytest.mark.parametrize(
    ("requested", "device", "free", "taken"),
    [
        ("auto", "cuda:0", 100 * GB, 4 * GB),
        ("auto", "cuda:0", 16 * GB, 4 * GB),
        ("auto", "cuda:0", 8 * GB, 2 * GB),
        ("auto", "cpu", 100 * GB, 0),
        (0, "cuda:0", 100 * GB, 0),
        (0, "cpu", 100 * GB, 0),
        (20 * GB, "cuda:0", 8 * GB, 20 * GB),
    ],
)
def test_auto_host_budget_is_4_gb_or_a_quarter_of_free_memory(
    requested: int | Literal["auto"], device: str, free: int, taken: int
) -> None:
    assert host_budget(requested, device, MemoryInfo(128 * GB, free, "this machine")) == taken


def test_host_budget_is_refused_on_the_cpu() -> None:
    with pytest.raises(StartupError, match=r"--host-kv-budget is 1\.00 GB; the model runs on the CPU, .* --kv-budget"):
        host_budget(GB, "cpu", MemoryInfo(128 * GB, 64 * GB, "this machine"))


def test_table_shows_memory_taken_and_what_it_holds() -> None:
    rows = dict(plan_rows(plan(SPEC, budget=KvBudget(GB, AUTO.auto_parts))))
    assert rows == {
        "free on this machine": "3.10 GB",
        "for the weights": "3.00 GB",
        "in reserve": "1.00 GB",
        "KV budget (auto)": "1.00 GB",
        "KV cache": "262.14 MB, the most that --max-running 64 can use",
        "KV dtype": "bf16",
        "bytes per token": "1,000",
        "tokens per page": "16",
        "pages": "16,384",
        "tokens": "262,144",
        "longest sequence": "4,096 tokens",
        "sequences of that length": "64",
    }


def test_sequence_of_a_model_with_windows_needs_room_for_its_window_and_the_steps_ahead() -> None:
    spec = PassSpec(100, 32_768, {"bf16": 1000}, kv_windows=(4096 + 63,))
    held = -(-(4158 + 2 * 512) // 16) + 2
    kv = plan(spec, budget=400 * 16_000)
    assert (kv.max_context_tokens, kv.num_pages, kv.num_longest_sequences) == (32_768, 400, 1)
    assert kv.max_pages_per_sequence == 2048
    assert plan(spec, budget=GB).num_pages == 64 * held
    rows = dict(plan_rows(kv))
    assert rows["of it in pages, because of windows"] == f"{16 * held:,} tokens"
    assert rows["sequences of that length"] == "1"
    assert plan(spec, budget=(held - 1) * 16_000).max_context_tokens == (held - 1) * 16
    full = replace(spec, kv_windows=(None,))
    assert plan(full, budget=400 * 16_000).max_context_tokens == 6400
    assert plan(replace(spec, state_bytes_per_sequence=1), budget=400 * 16_000).max_context_tokens == 399 * 16


def test_state_of_all_slots_comes_out_of_the_budget() -> None:
    spec = replace(SPEC, state_bytes_per_sequence=1_000_000)
    kv = plan(spec, budget=GB, max_running=200)
    assert kv.state_bytes == 200_000_000
    assert kv.num_pages == 800_000_000 // 16_000
    assert kv.device_bytes == 50_000 * 16_000 + 200_000_000 + 3 * GB
    assert dict(plan_rows(kv))["of the budget, state of 200 sequences"] == "200.00 MB"
    assert kv.describe().startswith("weights: 3.00 GB; state of 200 sequences: 200.00 MB; KV cache: bf16")
    message = (
        r"--kv-budget is 1\.00 GB; the state of --max-running 1001 sequences takes 1\.00 GB: raise .* --max-running"
    )
    with pytest.raises(StartupError, match=message):
        plan(spec, budget=GB, max_running=1001)


def test_checkpoints_of_states_take_a_part_of_the_budget_unless_the_longest_sequence_needs_it() -> None:
    spec = replace(SPEC, state_bytes_per_sequence=1_000_000, copies_states=True)
    kv = plan(spec, budget=GB, max_running=200)
    assert (kv.num_checkpoints, kv.checkpoint_bytes) == (200, 200_000_000)
    assert kv.num_pages == 600_000_000 // 16_000
    assert kv.device_bytes == 37_500 * 16_000 + 400_000_000 + 3 * GB
    assert dict(plan_rows(kv))["of the budget, 200 checkpoints of states"] == "200.00 MB"
    assert "state of 200 sequences: 200.00 MB; 200 checkpoints of states: 200.00 MB; KV cache" in kv.describe()
    small = plan(spec, budget=5_000_000, max_running=1, max_context_tokens=4_000, kv_dtype="bf16")
    assert (small.num_checkpoints, small.max_context_tokens) == (0, 4_000)


def test_tried_dtypes_have_their_own_table() -> None:
    _, tried = plan_tables(plan(SPEC, budget=10**6)).renderables
    columns = {column.header: list(column.cells) for column in tried.columns}  # type: ignore[union-attr]
    assert columns == {
        "KV dtype": ["bf16", "q8_0"],
        "bytes per token": ["1,000", "530"],
        "pages": ["62", "117"],
        "tokens": ["992", "1,872"],
        "sequences of 4,096 tokens": ["0.2", "0.5"],
    }
