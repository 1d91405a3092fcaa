"""A draft model changes no token, whatever it guesses, and is asked where that pays."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backend.engine.steps.draft_model import DraftAsk, DraftModel, num_spare_pages
from penstock.backend.engine.steps.model_drafting import MAX_OF_MODEL, ModelDrafting
from penstock.backend.engine.steps.step_timing import StepTiming
from penstock.backend.forward_pass import SamplingParams, StepBatch
from penstock.backend.kv_cache.earlier_texts import EarlierTexts
from penstock.backend.passes.fake import FakePass
from penstock.backend.sequences.sequence import Sequence
from penstock.shm.messages import Constraints, Sampling
from tests.backend.harness import Bench, expected_tokens

VOCAB_SIZE = 97
GREEDY = SamplingParams(temperature=0.0)
ASKS: tuple[dict[str, Any], ...] = (
    {},
    {"stop_ids": (7, 12, 50)},
    {"sampling": Sampling(temperature=0.0, frequency_penalty=0.3, repetition_penalty=1.1)},
    {"sampling": Sampling(temperature=0.9, top_p=0.9, seed=4)},
    {"constraints": Constraints(allowed_token_ids=tuple(range(40, 90)), bad_words=((41,), (50, 51)))},
    {"sampling": Sampling(temperature=0.0, num_logprobs=1)},
)


class OftenRight(FakePass):
    """Of three tokens one is another than the target's. Counts its tokens."""

    num_tokens = 0

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        self.num_tokens += batch.num_tokens
        logits = super().forward(batch)
        wrong = logits.argmax(axis=1) % 3 == 0
        logits[wrong] = np.roll(logits[wrong], 1, axis=1)
        return logits


class Eager(ModelDrafting):
    """Always wants guesses, and drafts all."""

    def __init__(self, texts: EarlierTexts | None = None) -> None:
        super().__init__(StepTiming(), texts, 1000)

    def _best_length(self, num_rows: int, rows: list[Sequence]) -> int:
        return MAX_OF_MODEL

    def _best_count(self, num_rows: int, chances: list[float]) -> int:
        return len(chances)


@pytest.mark.parametrize("num_pages", [200, 26])
@pytest.mark.parametrize("draft_class", [FakePass, OftenRight])
def test_answers_are_the_same_with_a_draft_model(draft_class: type[FakePass], num_pages: int) -> None:
    """With few pages sequences are preempted, and others take their pages."""
    answers = []
    for drafts in (False, True):
        options: dict[str, Any] = {"drafting": Eager(), "draft_pass": draft_class(VOCAB_SIZE, 4)} if drafts else {}
        bench = Bench(num_pages=num_pages if drafts else 200, max_running=4, **options)
        for request_id, asked in enumerate(ASKS):
            bench.submit(list(range(3, 14 + request_id)), 40 + request_id, request_id=request_id, **asked)
        bench.run_dry()
        assert (bench.board.accepted_tokens > 20) is drafts
        assert (bench.board.preemptions > 0) is (num_pages < 50 and drafts)
        assert bench.pool.num_held == 0
        answers.append([bench.received(request_id).token_ids for request_id in range(len(ASKS))])
        bench.close()
    assert answers[0] == answers[1]


def _ask(tokens: list[int], pages: list[int], salt: bytes = b"a", max_guessed: int = 5) -> DraftAsk:
    return DraftAsk(array("i", tokens), len(tokens), pages, 0, salt, GREEDY, (), max_guessed)


def test_pages_are_written_again_only_where_they_hold_another_text_or_tenant() -> None:
    forward_pass = OftenRight(VOCAB_SIZE, 4)
    forward_pass.create_cache(8 + num_spare_pages(4), 4, "fp32")
    model = DraftModel(forward_pass, 8, 4, 16)
    text, other = list(range(3, 14)), list(range(3, 11)) + [1] * 4
    fed = []
    guesses = []
    for ask in (
        _ask(text, [1, 2, 3]),
        _ask(text, [1, 2, 3]),
        _ask(other, [1, 2, 5]),
        _ask(text, [1, 2, 3]),
        _ask(other, [6, 2, 5]),
        _ask(text, [1, 2, 3], b"b"),
        _ask([*text, 1, 1, 1, 1, 1], [1, 2, 3, 5], b"b"),
    ):
        before = forward_pass.num_tokens
        (guess,) = model.guess([ask], VOCAB_SIZE).tokens
        fed.append(forward_pass.num_tokens - before - max(0, len(guess) - 1))
        guesses.append(guess)
    assert fed == [11, 1, 4, 1, 12, 11, 5]
    assert guesses[0] == guesses[1] == guesses[3] == guesses[5]
    assert guesses[2] == guesses[4]
    assert all(len(guess) == 5 for guess in guesses)


def test_texts_are_read_in_parts_and_shared_pages_are_written_by_one_row() -> None:
    forward_pass = FakePass(VOCAB_SIZE, 4)
    forward_pass.create_cache(32 + num_spare_pages(4), 4, "fp32")
    model = DraftModel(forward_pass, 32, 4, 16)
    long, twin = list(range(40)), [*range(8), 50]
    asks = [_ask(twin, [20, 21, 22]), _ask(long, list(range(10))), _ask([*range(8), 51], [20, 21, 23])]
    found = [model.guess(asks, VOCAB_SIZE).tokens for _ in range(5)]
    right = [expected_tokens(list(ask.tokens), 5, VOCAB_SIZE) for ask in asks]
    assert found[0] == [right[0], None, None]
    assert found[1] == [right[0], None, None]
    assert found[-1] == right


def test_tokens_that_only_the_target_knows_do_not_reach_the_draft_model() -> None:
    class Checking(FakePass):
        def forward(self, batch: StepBatch) -> NDArray[np.float32]:
            for init in batch.slot_inits:
                assert max(*init.token_ids, *dict(init.sampling.logit_bias)) < VOCAB_SIZE
            return super().forward(batch)

    forward_pass = Checking(VOCAB_SIZE, 4)
    forward_pass.create_cache(32 + num_spare_pages(4), 4, "fp32")
    model = DraftModel(forward_pass, 32, 4, 16, min_chance=1e-30)
    for text in ([1, 2, VOCAB_SIZE], [*range(20), VOCAB_SIZE]):
        assert model.guess([_ask(text, list(range(6)))], 2 * VOCAB_SIZE).tokens == [[]]
    bias = replace(GREEDY, logit_bias=((VOCAB_SIZE, 90.0), (5, 80.0)))
    asked = replace(_ask([1, 2], [30]), sampling=bias)
    assert model.guess([asked], 2 * VOCAB_SIZE).tokens == [[5] * 5]


def test_text_without_a_finite_guess_ends_no_other_texts_guesses(caplog: pytest.LogCaptureFixture) -> None:
    class Overflowing(OftenRight):
        def forward(self, batch: StepBatch) -> NDArray[np.float32]:
            logits = super().forward(batch)
            logits[1:] = np.nan
            return logits

    bench = Bench(drafting=Eager(), draft_pass=Overflowing(VOCAB_SIZE, 4))
    for request_id, prompt in enumerate(([3, 5], [8, 6, 11])):
        bench.submit(prompt, 40, request_id=request_id)
    bench.run_dry()
    assert bench.board.accepted_tokens > 10
    assert not [line for line in caplog.messages if "failed" in line]
    bench.close()


def test_draft_model_that_is_never_certain_is_seldom_asked() -> None:
    draft_pass = OftenRight(VOCAB_SIZE, 4)
    bench = Bench(drafting=_quick(0.001), draft_pass=draft_pass, min_chance=2.0)
    bench.submit([3, 5], 60)
    bench.run_dry()
    assert bench.received(0).token_ids == expected_tokens([3, 5], 60, VOCAB_SIZE)
    assert draft_pass.num_tokens < 20
    bench.close()


def test_text_that_repeats_is_guessed_from_itself_beside_a_draft_model() -> None:
    """While the draft model guesses, what the text would have guessed is judged all the same."""
    answers = []
    for drafting in (Eager(), Eager(EarlierTexts(64, 4))):
        draft_pass = OftenRight(VOCAB_SIZE, 4)
        bench = Bench(drafting=drafting, draft_pass=draft_pass, max_context=600)
        bench.submit([1, 2, 3], 90, sampling=Sampling(temperature=0.0, logit_bias={5: 50.0, 6: 49.0}))
        bench.run_dry()
        answers.append((bench.received(0).token_ids, draft_pass.num_tokens))
        bench.close()
    assert answers[0] == answers[1]
    assert answers[0][1] < 60


def _quick(pass_s: float) -> ModelDrafting:
    """A pass of the draft model takes pass_s, one of the target 0.01 s."""
    times = StepTiming()
    for num_tokens in (1, 64):
        times.note_plan(num_tokens, 0.0)
        times.note_result(num_tokens, 0.010, 0.0)
    drafting = ModelDrafting(times, None, 1000)
    drafting.note_guessed(10, 10 * pass_s)
    drafting.note_guessed = lambda *_: None  # type: ignore[method-assign]
    return drafting


@pytest.mark.parametrize(("pass_s", "is_worth_it"), [(0.001, True), (0.012, False)])
def test_draft_model_is_asked_where_it_is_quick(pass_s: float, *, is_worth_it: bool) -> None:
    bench = Bench(drafting=_quick(pass_s), draft_pass=FakePass(VOCAB_SIZE, 4))
    bench.submit([3, 5], 60)
    bench.run_dry()
    assert bench.received(0).token_ids == expected_tokens([3, 5], 60, VOCAB_SIZE)
    assert (bench.board.accepted_tokens > 30) is is_worth_it
    bench.close()


def test_server_goes_on_without_a_draft_model_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(OftenRight):
        def forward(self, batch: StepBatch) -> NDArray[np.float32]:
            if self.num_tokens > 20:
                raise ValueError("no")
            return super().forward(batch)

    bench = Bench(drafting=Eager(), draft_pass=Failing(VOCAB_SIZE, 4))
    bench.submit([3, 5], 60)
    bench.run_dry()
    assert bench.received(0).token_ids == expected_tokens([3, 5], 60, VOCAB_SIZE)
    assert sum("the draft model failed" in line for line in caplog.messages) == 1
    bench.close()
