from __future__ import annotations

import pytest

from penstock.backend.options import BackendOptions
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.load_generator.stats import ObservedRequest, Outcome
from penstock.tools.bench.serving.bare_step import measure_floor
from penstock.tools.bench.serving.floor import BareStep, EngineStep, decode_step_s


def stream(*event_times_s: float, tokens_per_event: int = 1) -> ObservedRequest:
    tokens = tokens_per_event * len(event_times_s)
    return ObservedRequest(0.0, list(event_times_s), event_times_s[-1], 4, tokens, Outcome.COMPLETED)


def test_step_is_the_gap_between_tokens_while_all_decode() -> None:
    # The second request prefills until 3.0, which slows the first one down; the first ends at 6.0.
    records = [stream(0.0, 1.0, 3.0, 4.0, 5.0, 6.0), stream(3.0, 4.0, 5.0, 6.0, 9.0)]
    assert decode_step_s(records) == pytest.approx(1.0)


def test_event_of_two_tokens_counts_as_two_steps() -> None:
    assert decode_step_s([stream(0.0, 1.0, 2.0, tokens_per_event=2)]) == pytest.approx(0.5)


def test_streams_that_never_decoded_together_are_refused() -> None:
    with pytest.raises(BenchError, match="together"):
        decode_step_s([stream(0.0, 1.0), stream(2.0, 3.0)])


def test_failed_request_ends_the_measurement() -> None:
    with pytest.raises(BenchError, match="boom"):
        decode_step_s([ObservedRequest(0.0, error="boom")])


def test_ratio_compares_the_engine_with_the_bare_work() -> None:
    step = EngineStep(BareStep(4, linear_ms=3.0, attention_ms=1.0, bare_ms=4.0, step_ms=5.0), engine_ms=6.0)
    assert step.ratio == 1.5
    assert step.aim().reached


def test_bare_work_of_the_demo_model_is_linears_and_attention() -> None:
    small, large = measure_floor(BackendOptions(gpu="none"), (1, 3), context_tokens=40, num_steps=2)
    assert (small.batch_size, large.batch_size) == (1, 3)
    for step in (small, large):
        assert step.linear_ms > 0
        assert step.attention_ms > 0
        assert step.bare_ms == step.linear_ms + step.attention_ms
