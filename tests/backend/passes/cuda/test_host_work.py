"""A captured decode step costs the host few calls: objects that it makes are cold each time."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.backend.passes.cuda.recorded_calls import RecordedGraph
from tests.backend.passes.cuda.tiny_models import MAX_ROWS, make_driver

if TYPE_CHECKING:
    from types import FrameType

MOST_CALLS = 120
"""Of Python functions and of built-in ones, from the batch to the host's tokens."""


def test_decode_step_makes_few_calls_whatever_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver()
    rows = [driver.add([1 + index, 2, 3]) for index in range(MAX_ROWS)]
    driver.prefill()
    driver.step([(row, 1) for row in rows])
    decoder: Any = driver.forward_pass
    monkeypatch.setattr(RecordedGraph, "replay", lambda _: None)
    calls = []
    for count in (1, MAX_ROWS):
        batch, found = driver.build([(row, 1) for row in rows[:count]]), 0

        def note(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal found
            found += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            decoder.sample(decoder.forward(batch), batch, None).wait()
        finally:
            sys.setprofile(None)
        calls.append(found)
    assert calls[0] == calls[1] <= MOST_CALLS
