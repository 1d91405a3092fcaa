"""Equal requests for tests of the engine."""

from __future__ import annotations

from typing import Any

from tests.backend.harness import Bench

PROMPT = [5, 6, 7]


def share(bench: Bench, request_id: int, max_tokens: int = 10, prompt: list[int] | None = None, **options: Any) -> None:
    bench.submit(prompt or PROMPT, max_tokens, request_id=request_id, **({"may_share": True} | options))


def rows_for(prompt: list[int], max_tokens: int) -> int:
    """Rows that the prompt takes alone."""
    bench = Bench()
    bench.submit(prompt, max_tokens)
    bench.run_dry()
    return bench.executor.num_rows_run
