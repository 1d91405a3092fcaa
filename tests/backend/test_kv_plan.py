from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.errors import StartupError
from backend.forward_pass import PassSpec
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
    return plan_kv(FakePass(100, 4).spec, **(settings | changes))


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


SPEC = PassSpec(100, 4096, {"bf16": 1000, "q8_0": 530, "fp32": 2000})


@pytest.mark.parametrize(
    ("budget", "context", "running", "kv_dtype"),
    [
        (4096 * 1000, None, 64, "bf16"),
        (4095 * 1000, None, 64, "q8_0"),
        (1000 * 1000, None, 64, "q8_0"),
        (10**9, 4096, 64, "bf16"),
        (2 * 10**8, 4096, 64, "q8_0"),
        (10**9, None, 64, "bf16"),
    ],
)
def test_auto_narrows_until_what_is_asked_for_fits(
    budget: int, context: int | None, running: int, kv_dtype: str
) -> None:
    kv = plan_kv(
        SPEC,
        budget_bytes=budget,
        kv_dtype="auto",
        page_size_tokens=16,
        max_context_tokens=context,
        max_running=running,
    )
    assert kv.kv_dtype == kv_dtype
    assert kv.num_bytes <= budget
    assert dict(kv.rows())["KV dtype"] == kv_dtype
