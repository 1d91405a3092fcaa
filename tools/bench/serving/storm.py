"""Many clients of whom half go away at random moments; afterwards nothing may be left behind."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from penstock.tools.bench.load_generator.sending import BenchError, ReadyState, Target

_SETTLE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What the server held once the last client had gone. clean_after_s is None where it never came to nothing."""

    running: int
    waiting: int
    pages_used: int
    clean_after_s: float | None


async def settle(target: Target) -> Aftermath:
    """Waits until nothing runs or waits and every page is free, for at most 10 s. Raises BenchError."""
    started_s = time.monotonic()
    while True:
        state = await target.ready_state()
        elapsed_s = time.monotonic() - started_s
        held = _held(state)
        if held == (0, 0, 0) or elapsed_s > _SETTLE_TIMEOUT_S:
            return Aftermath(*held, clean_after_s=elapsed_s if held == (0, 0, 0) else None)
        await asyncio.sleep(0.02)


def _held(state: ReadyState) -> tuple[int, int, int]:
    if state.running is None or state.waiting is None or state.pages_used is None:
        raise BenchError("/ready does not tell running, waiting and pages_used: not a Penstock server")
    return state.running, state.waiting, state.pages_used
