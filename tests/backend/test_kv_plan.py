from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.errors import StartupError
from backend.kv_plan import plan_kv
from backend.passes.fake import FakePass

BYTES_PER_TOKEN = 8


def plan(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "budget_bytes": 10_000,
        "kv_dtype": "auto",
        "page_size_tokens": 16,
        "max_context_tokens": None,
        "max_running": 64,
    }
    return plan_kv(FakePass(100, 4), **(settings | changes))


@given(st.integers(1, 10**7), st.integers(1, 512), st.integers(1, 100))
def test_the_budget_is_never_exceeded_by_a_byte_and_no_page_that_fits_is_left_out(
    budget: int, page_size: int, max_running: int
) -> None:
    page_bytes = page_size * BYTES_PER_TOKEN
    if budget < page_bytes:
        with pytest.raises(StartupError, match="--kv-budget"):
            plan(budget_bytes=budget, page_size_tokens=page_size, max_running=max_running)
        return
    kv = plan(budget_bytes=budget, page_size_tokens=page_size, max_running=max_running)
    assert kv.num_pages * page_bytes <= budget
    assert kv.max_context_tokens <= kv.num_pages * page_size
    useful = max_running * kv.max_pages_per_sequence
    assert kv.num_pages == min(budget // page_bytes, useful)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"budget_bytes": 0}, "one page of 16 tokens"),
        ({"max_context_tokens": 1 << 20}, "made for 65536"),
        ({"max_context_tokens": 5000}, "holds 1248 tokens"),
        ({"kv_dtype": "bf16"}, "this forward pass has fp32"),
    ],
)
def test_an_impossible_setting_names_value_limit_and_remedy(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        plan(**changes)


def test_a_context_that_fits_is_kept() -> None:
    assert plan(max_context_tokens=600).max_context_tokens == 600
