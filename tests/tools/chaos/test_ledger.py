"""The ledger books every end, and names each planted imbalance."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.tools.chaos.ledger import Allowance, Answer, ChoiceAnswer, Ending, EndKind, Ledger, difference

RIGHT = Answer(
    (ChoiceAnswer("ab", (1, 2), "length"), ChoiceAnswer("cde", (3, 4, 5), "stop")), prompt_tokens=7, completion_tokens=5
)
WHOLE = Ending(0, started_s=1.0, ended_s=2.0, answer=RIGHT, status=200)
NOTHING_ALLOWED = Allowance()


def beginning(*choices: tuple[str, tuple[int, ...]]) -> Answer:
    return Answer(tuple(ChoiceAnswer(text, token_ids, "") for text, token_ids in choices))


def booked(ending: Ending, allowance: Allowance = NOTHING_ALLOWED, *kills_s: float, **options: bool) -> Ledger:
    ledger = Ledger(**options)
    for at_s in kills_s:
        ledger.note_kill(at_s, 1).gone_s = at_s + 0.2
    ledger.open(0, 2)
    ledger.end(ending, RIGHT, allowance)
    ledger.close()
    return ledger


def test_right_answer_balances() -> None:
    ledger = booked(WHOLE)
    assert ledger.ends == {EndKind.COMPLETE: 1}
    assert ledger.imbalances == {}
    assert (ledger.tokens_received, ledger.num_choices) == (5, 2)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (replace(RIGHT, choices=(ChoiceAnswer("a", (1,), "length"), RIGHT.choices[1])), "1 tokens instead of 2"),
        (replace(RIGHT, choices=(ChoiceAnswer("ab", (1, 9), "length"), RIGHT.choices[1])), "departs at token 1 of 2"),
        (replace(RIGHT, choices=(ChoiceAnswer("ab", (1, 2, 2), "length"), RIGHT.choices[1])), "departs at token 2"),
        (replace(RIGHT, choices=(ChoiceAnswer("a", (1, 2), "length"), RIGHT.choices[1])), "1 characters instead of 2"),
        (replace(RIGHT, choices=(ChoiceAnswer("x", (1, 2), "length"), RIGHT.choices[1])), "other text"),
        (replace(RIGHT, choices=(ChoiceAnswer("ab", (1, 2), "stop"), RIGHT.choices[1])), 'ended with "stop"'),
        (replace(RIGHT, choices=RIGHT.choices[:1]), "1 choices instead of 2"),
        (replace(RIGHT, completion_tokens=4), "the usage says 4 tokens; 5 arrived"),
        (replace(RIGHT, prompt_tokens=8), "8 prompt tokens instead of 7"),
    ],
)
def test_wrong_answer_is_named(answer: Answer, named: str) -> None:
    ledger = booked(replace(WHOLE, answer=answer))
    assert ledger.ends == {EndKind.FAILED: 1}
    assert ledger.imbalances == {"an answer is wrong": 1}
    assert named in ledger.examples["an answer is wrong"][0]


UNUSABLE = Answer((), refusal=(503, "backend_unavailable"))


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        (Ending(0, 1.0, 2.0, status=503, code="backend_unavailable"), EndKind.REFUSED),
        (Ending(0, 1.0, 2.0, answer=UNUSABLE, status=200, code="backend_unavailable", fault="event"), EndKind.REFUSED),
        (Ending(0, 1.0, 2.0, status=500, code="server_error"), EndKind.FAILED),
        (WHOLE, EndKind.FAILED),
    ],
)
def test_refusal_of_a_model_that_cannot_be_used_is_its_right_answer(ending: Ending, kind: EndKind) -> None:
    ledger = Ledger()
    ledger.open(0, 1)
    assert ledger.end(ending, UNUSABLE, NOTHING_ALLOWED) is kind


@pytest.mark.parametrize(("code", "kind"), [("overloaded", EndKind.REFUSED), ("internal", EndKind.FAILED)])
def test_refusal_in_a_stream_that_has_begun_is_judged_by_its_code(
    code: str, kind: EndKind, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger()
    ledger.open(0, 2)
    ending = replace(WHOLE, answer=beginning(("", ()), ("", ())), code=code, fault=f"error event {code}")
    assert ledger.end(ending, RIGHT, Allowance(frozenset({(200, "overloaded")}))) is kind
    # Each failure is told as it happens.
    told = {EndKind.REFUSED: "", EndKind.FAILED: "a request failed: request 0: error event internal\n"}
    assert capsys.readouterr().out == told[kind]


TEXT_ONLY = Answer((ChoiceAnswer("ab", (), "stop"),), prompt_tokens=7, completion_tokens=5, has_token_ids=False)


def test_answer_without_ids_is_judged_by_text_and_usage() -> None:
    assert difference(TEXT_ONLY, TEXT_ONLY, is_whole=True) == ""
    assert TEXT_ONLY.received_tokens == 5
    fewer = replace(TEXT_ONLY, completion_tokens=4)
    assert difference(fewer, TEXT_ONLY, is_whole=True) == "the usage says 4 tokens instead of 5"


@pytest.mark.parametrize("part", [beginning(("", ()), ("", ())), beginning(("a", (1,)), ("cde", (3, 4, 5)))])
def test_dropped_request_may_have_any_beginning_of_its_answer(part: Answer) -> None:
    ledger = booked(replace(WHOLE, answer=part, is_dropped=True))
    assert ledger.ends == {EndKind.DROPPED: 1}
    assert ledger.imbalances == {}


def test_dropped_request_with_a_wrong_token_is_named() -> None:
    ledger = booked(replace(WHOLE, answer=beginning(("a", (9,)), ("", ())), is_dropped=True))
    assert ledger.imbalances == {"an answer is wrong": 1}


def test_request_that_ends_twice_or_was_never_sent_is_named() -> None:
    ledger = Ledger()
    ledger.open(0, 2)
    ledger.end(WHOLE, RIGHT, NOTHING_ALLOWED)
    ledger.end(WHOLE, RIGHT, NOTHING_ALLOWED)
    ledger.end(replace(WHOLE, index=5), RIGHT, NOTHING_ALLOWED)
    ledger.open(5, 2)
    ledger.close()
    assert ledger.imbalances == {
        "a request ended twice": 1,
        "a request ended that was never sent": 1,
        "a request was sent twice": 1,
        "a request never ended": 1,
        "the ends do not add up": 1,
    }


def test_request_that_never_ends_is_named() -> None:
    ledger = Ledger()
    ledger.open(3, 1)
    ledger.close()
    assert ledger.examples == {"a request never ended": ["request 3"]}


BROKEN = replace(WHOLE, answer=beginning(("a", (1,)), ("", ())), fault="closed", is_broken=True)


@pytest.mark.parametrize(
    ("ending", "kill_s", "kind"),
    [
        (BROKEN, 1.5, EndKind.CUT),
        (BROKEN, 0.9, EndKind.CUT),  # sent on a connection of a worker that was not gone yet
        (BROKEN, 0.5, EndKind.FAILED),
        (replace(BROKEN, ended_s=4.5), 1.5, EndKind.CUT),  # a slow reader
        (replace(BROKEN, ended_s=5.0), 1.5, EndKind.FAILED),  # it outlived the kill, so it had another worker
        (BROKEN, 2.5, EndKind.FAILED),
        (replace(BROKEN, is_broken=False), 1.5, EndKind.FAILED),  # an error event is the server's own word
    ],
)
def test_only_a_kill_meanwhile_explains_a_broken_connection(ending: Ending, kill_s: float, kind: EndKind) -> None:
    ledger = booked(ending, NOTHING_ALLOWED, kill_s)
    assert ledger.ends == {kind: 1}
    assert ledger.imbalances == ({} if kind is EndKind.CUT else {"a request failed": 1})


REFUSED = replace(WHOLE, answer=None, status=429, code="overloaded", has_retry_after=True)
OVERLOADED = Allowance(frozenset({(429, "overloaded")}))


@pytest.mark.parametrize(
    ("ending", "allowance", "tolerant", "imbalance"),
    [
        (REFUSED, OVERLOADED, False, None),
        (REFUSED, NOTHING_ALLOWED, False, "a request was refused that should not be"),
        (REFUSED, NOTHING_ALLOWED, True, None),
        (replace(REFUSED, has_retry_after=False), OVERLOADED, True, "a refusal has no Retry-After"),
        (
            replace(REFUSED, status=500, code="internal_error"),
            OVERLOADED,
            True,
            "a request was refused that should not be",
        ),
        (replace(REFUSED, status=503, code=""), OVERLOADED, True, "a request was refused that should not be"),
    ],
)
def test_refusal_must_be_allowed_and_say_when_to_retry(
    ending: Ending, allowance: Allowance, tolerant: bool, imbalance: str | None
) -> None:
    ledger = booked(ending, allowance, allow_refusals=tolerant)
    assert ledger.ends == {EndKind.FAILED if imbalance else EndKind.REFUSED: 1}
    assert list(ledger.imbalances) == ([imbalance] if imbalance else [])


def test_all_imbalances_are_counted_and_few_are_kept() -> None:
    ledger = Ledger()
    for number in range(100):
        ledger.expect("fds", number, -1)
    assert ledger.imbalances == {"fds": 100}
    assert ledger.examples["fds"] == [f"{number} instead of -1" for number in range(5)]


def test_no_more_requests_are_cut_than_the_killed_worker_had_connections() -> None:
    ledger = Ledger()
    ledger.note_kill(1.2, 1).gone_s = 1.3
    ledger.note_kill(1.5, 2).gone_s = 1.6
    ledger.note_kill(9.0, 5)
    for index in range(4):
        ledger.open(index, 1)
        ledger.end(replace(BROKEN, index=index), RIGHT, NOTHING_ALLOWED)
    assert ledger.ends == {EndKind.CUT: 3, EndKind.FAILED: 1}
    assert ledger.examples == {"more requests were cut than a killed worker had connections": ["request 3"]}
    assert ledger.num_connections_killed == 8
