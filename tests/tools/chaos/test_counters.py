"""The server's counters against the clients' books."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.tools.chaos.counters import (
    CountedRound,
    Samples,
    StormTotals,
    check_counted,
    check_idle,
    check_storm,
    num_frontends,
    parse_metrics,
)
from penstock.tools.chaos.ledger import Answer, ChoiceAnswer, Ledger

IDLE = """
# TYPE penstock_backend_up gauge
penstock_backend_up 1
penstock_sequences_running 0
penstock_sequences_waiting 0
penstock_kv_pages{state="used"} 0
penstock_kv_pages{state="idle"} 12
penstock_streams_open 0
penstock_requests_accepted_total 10
penstock_requests_total{outcome="finished"} 6
penstock_requests_total{outcome="cancelled"} 3
penstock_requests_total{outcome="rejected"} 5
penstock_requests_total{outcome="failed"} 1
penstock_requests_total{outcome="expired"} 0
penstock_streams_total{outcome="stop"} 2
penstock_streams_total{outcome="length"} 4
penstock_tokens_streamed_total 100
penstock_http_responses_total{status="200"} 20
"""


def idle(**changed: float) -> Samples:
    return parse_metrics(IDLE) | {f"penstock_{name}": value for name, value in changed.items()}


def test_idle_server_balances() -> None:
    ledger = Ledger()
    check_idle(ledger, idle(), "at the end")
    assert ledger.imbalances == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ('kv_pages{state="used"}', 1),
        ("sequences_running", 1),
        ("sequences_waiting", 2),
        ("streams_open", 1),
        ("requests_accepted_total", 11),
        ('requests_total{outcome="finished"}', 7),
    ],
)
def test_leaked_page_sequence_stream_or_request_is_named(name: str, value: float) -> None:
    ledger = Ledger()
    check_idle(ledger, idle(**{name: value}), "at the end")
    (imbalance,) = ledger.imbalances
    assert name.partition("{")[0].removeprefix("requests_") in imbalance or "requests_accepted" in imbalance


def test_numbers_of_replicas_and_models_are_added_up() -> None:
    samples = parse_metrics(
        'penstock_backend_up{model="a",replica="1"} 1\npenstock_backend_up{model="b"} 0\n'
        'penstock_requests_total{model="a",replica="1",outcome="finished"} 2\n'
        'penstock_requests_total{model="a, b",outcome="finished"} 3\npenstock_frontends{model="a",replica="1"} 4\n'
    )
    assert samples['penstock_requests_total{outcome="finished"}'] == 5
    assert (samples["penstock_backend_up"], samples["backends"], num_frontends(samples)) == (1, 2, 4)


def test_missing_number_is_an_imbalance() -> None:
    samples = idle()
    del samples["penstock_streams_open"]
    ledger = Ledger()
    check_idle(ledger, samples, "at the end")
    assert len(ledger.imbalances) == 1


ANSWER = Answer((ChoiceAnswer("ab", (1, 2), "stop"), ChoiceAnswer("c", (3,), "length")), 5, 3)
COUNTED = {
    "requests_accepted_total": 14,
    'requests_total{outcome="finished"}': 10,
    'streams_total{outcome="stop"}': 4,
    'streams_total{outcome="length"}': 6,
    "tokens_streamed_total": 106,
    'http_responses_total{status="200"}': 23,
}
ROUND = CountedRound.of([ANSWER, ANSWER], reads=1, most_checks=0)


def test_counters_that_grew_by_what_arrived_balance() -> None:
    ledger = Ledger()
    check_counted(ledger, idle(), idle(**COUNTED), ROUND)
    assert ledger.imbalances == {}


@pytest.mark.parametrize(
    ("num_more", "most_checks", "named"),
    [
        (-1, 0, "2 instead of 3"),
        (1, 0, "4 instead of 3"),
        (4, 4, None),
        (5, 4, "8 instead of 3 to 7"),
        (-1, None, "2 instead of 3 to inf"),
        (900, None, None),
    ],
)
def test_answers_are_counted_exactly_but_for_health_checks(
    num_more: int, most_checks: int | None, named: str | None
) -> None:
    ledger, name = Ledger(), 'http_responses_total{status="200"}'
    round_ = replace(ROUND, most_checks=most_checks)
    check_counted(ledger, idle(), idle(**(COUNTED | {name: COUNTED[name] + num_more})), round_)
    assert ledger.examples == ({} if named is None else {"answers of status 200": [named]})


@pytest.mark.parametrize("name", list(COUNTED))
def test_lost_or_doubled_token_stream_or_answer_is_named(name: str) -> None:
    ledger = Ledger()
    check_counted(ledger, idle(), idle(**(COUNTED | {name: COUNTED[name] - 2})), ROUND)
    assert len(ledger.imbalances) == 1


@pytest.mark.parametrize(
    ("changed", "imbalance"),
    [
        ({}, None),
        ({'requests_total{outcome="finished"}': 8}, "finished requests are fewer than complete answers"),
        ({"requests_accepted_total": 12}, "accepted requests are fewer than finished ones"),
        ({"requests_accepted_total": 31}, "accepted requests are more than were sent"),
        ({"tokens_streamed_total": 105}, "streamed tokens are fewer than arrived"),
    ],
)
def test_counters_of_a_storm_are_between_what_arrived_and_what_was_sent(
    changed: dict[str, float], imbalance: str | None
) -> None:
    ledger = Ledger()
    before = StormTotals(idle(), choices=100, complete_choices=50, tokens=1000)
    after = StormTotals(idle(**(COUNTED | changed)), choices=120, complete_choices=53, tokens=1006)
    check_storm(ledger, before, after, "after round 1")
    assert list(ledger.imbalances) == ([imbalance] if imbalance else [])
