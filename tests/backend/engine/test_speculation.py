"""Drafts change no token, whatever the requests ask for: with the kernels, and with the fake pass."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.backend.engine.steps.model_drafting import ModelDrafting
from penstock.backend.engine.steps.step_timing import StepTiming
from penstock.backend.forward_pass import PassOptions, StepBatch
from penstock.backend.kv_cache.earlier_texts import EarlierTexts
from penstock.backend.passes.decoder import cpu_pass
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.passes.fake import FakePass
from penstock.backend.scheduling.drafting import MAX_DRAFTS, Drafting, may_have_drafts
from penstock.backend.sequences.prompt_lookup import MAX_GUESSED, Guesser, PromptLookup
from penstock.backend.sequences.sequence import Sequence
from penstock.shm.messages import Constraints, Finish, Grammar, Sampling
from tests.backend.engine.test_draft_model import Eager as EagerModel
from tests.backend.harness import Bench, Received, expected_tokens
from tests.backend.recorded import Recorded
from tests.backend.structured_output.constrained import ask, compile_all, new_bench, new_compiler
from tests.backend.structured_output.constrained import text as text_of
from tests.checkpoints import load_oracle, make_checkpoint
from tests.lora import make_adapter
from tests.temporary import make_shared_directory

VOCAB_SIZE = 256
ASKS = {
    "greedy": {},
    "stop ids": {"stop_ids": (7, 12, 200)},
    "penalties": {"sampling": Sampling(temperature=0.0, frequency_penalty=0.3, repetition_penalty=1.1)},
    "seeded": {"sampling": Sampling(temperature=0.4, top_p=0.9, seed=4)},
    "token lists": {"constraints": Constraints(allowed_token_ids=tuple(range(40, 90)), bad_words=((41,), (50, 51)))},
    "adapter": {"adapter": "adapter-0"},
    "log probabilities": {"sampling": Sampling(temperature=0.0, num_logprobs=1)},
}


@pytest.fixture(scope="module")
def model() -> tuple[Path, Path]:
    """A checkpoint and an adapter."""
    if cpu_pass.load_kernels() is None:
        pytest.skip("this machine has no native kernels")
    model_dir = make_checkpoint("llama3", make_shared_directory(), dtype=torch.bfloat16, head_dim=32)
    return model_dir, make_adapter(load_oracle(model_dir), make_shared_directory(), seed=1, rank=4)


class Foretold(Drafting):
    """Drafts tokens that requests are known to receive, with some errors."""

    def __init__(self, answers: dict[int, list[int]], error_rate: float = 0.2, max_drafts: int = MAX_DRAFTS) -> None:
        super().__init__(StepTiming(), max_drafts=max_drafts)
        self._answers, self._error_rate = answers, error_rate
        self._rng = np.random.default_rng(5)

    def choose(self, decodes: list[Sequence]) -> dict[Sequence, list[int]]:
        drafts: dict[Sequence, list[int]] = {}
        for sequence in filter(may_have_drafts, decodes):
            left = self.max_drafts - sum(map(len, drafts.values()))
            first = sequence.num_computed - sequence.num_prompt_tokens
            end = min(first + int(self._rng.integers(1, 6)), sequence.max_total_tokens - 1 - sequence.num_prompt_tokens)
            answer = self._answers[next(iter(sequence.subscribers)).request_id]
            if tokens := [token ^ int(self._rng.random() < self._error_rate) for token in answer[first:end][:left]]:
                drafts[sequence] = tokens
        return drafts


def _load(model_dir: Path, options: PassOptions) -> CpuDecoderPass:
    loaded = CpuDecoderPass.load(model_dir, options)
    create = loaded.create_cache
    loaded.create_cache = lambda pages, size, _: create(pages, size, "q8_0")  # type: ignore[method-assign]
    return loaded


def _answer_all(model: tuple[Path, Path], quantize: str, num_pages: int, drafting: Drafting | None) -> Bench:
    """A draft model is the model itself with rounded weights."""
    has_model = isinstance(drafting, ModelDrafting)
    settings = {"max_running": 4 if has_model else 8, "max_batch_tokens": 64}
    loaded = _load(model[0], PassOptions(**settings, quantize=quantize, adapters=model[1:], dtype="bf16"))
    draft_pass = _load(model[0], PassOptions(**settings, quantize="int8", dtype="bf16")) if has_model else None
    sizes = {"page_size": 16, "num_pages": num_pages, "vocab_size": VOCAB_SIZE, **settings}
    bench = Bench(forward_pass=loaded, drafting=drafting, draft_pass=draft_pass, min_chance=1e-30, **sizes)
    rng = np.random.default_rng(0)
    for request_id, asked in enumerate(ASKS.values()):
        prompt = rng.integers(3, VOCAB_SIZE, 27).tolist()
        bench.submit(prompt, 60 + request_id, request_id=request_id, **asked)
    bench.run_dry()
    bench.close()
    for each in (loaded, draft_pass):
        if each is not None:
            each.close()
    return bench


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_answers_are_the_same_with_drafts(model: tuple[Path, Path], quantize: str) -> None:
    """With few pages sequences are preempted, and drafts get no pages."""
    plain = _answer_all(model, quantize, 200, None)
    expected = [plain.received(request_id) for request_id in range(len(ASKS))]
    assert all(len(answer.token_ids) > 1 for answer in expected)
    foretold = {number: answer.token_ids for number, answer in enumerate(expected)}
    for num_pages, drafting in ((200, Foretold(foretold)), (24, Foretold(foretold)), (14, EagerModel())):
        bench = _answer_all(model, quantize, num_pages, drafting)
        for request_id, name in enumerate(ASKS):
            assert _facts(bench.received(request_id)) == _facts(expected[request_id]), name
        assert bench.pool.num_held == 0
        assert sum(batch.drafts is not None for batch in bench.executor.batches) > 20


def _facts(received: Received) -> tuple[list[int], list[Finish], list[float]]:
    return received.token_ids, received.finishes, [entry.logprob for entry in received.logprobs if entry is not None]


def test_tokens_after_a_stop_among_the_drafts_are_dropped() -> None:
    """An equal request, which comes after the device saw the stop, is computed anew."""
    expected = expected_tokens([3, 5], 12, 97)
    assert len(set(expected[:6])) == 6
    bench = Bench(drafting=Foretold({0: expected, 1: expected}, error_rate=0.0))
    bench.submit([3, 5], 12, stop_ids=(expected[3],), may_share=True)
    while not any(batch.drafts is not None for batch in bench.executor.batches):
        bench.turn()
    for _ in range(2):
        bench.executor.run_one()
    bench.submit([3, 5], 12, request_id=1, may_share=True)
    bench.run_dry()
    assert bench.received(0).token_ids == expected[:4]
    assert bench.received(0).finishes == [Finish.STOP]
    assert bench.received(1).token_ids == expected
    assert bench.pool.num_held == 0
    bench.close()


def test_recording_has_the_rows_and_all_tokens_of_steps_with_drafts() -> None:
    answer = expected_tokens([3, 5], 30, 97)
    recorded = Recorded(with_tokens=True, drafting=Foretold({0: answer}))
    recorded.bench.submit([3, 5], 30)
    recorded.bench.run_dry()
    life = recorded.life()
    assert [life.steps[number].rows for number in sorted(life.steps)] == recorded.plans
    assert [token for step in life.steps.values() for tokens in step.token_ids.values() for token in tokens] == answer
    assert recorded.bench.board.accepted_tokens > 5
    recorded.close()


def test_guess_is_what_followed_the_last_three_tokens_before() -> None:
    rng = np.random.default_rng(1)
    text = array("i", rng.integers(0, 50, 300).tolist())
    for seed_length in (5, 299):
        lookup, tokens = PromptLookup(300), text[:seed_length]
        for token in text[seed_length:]:
            runs = [place for place in range(3, len(tokens)) if tokens[place - 3 : place] == tokens[-3:]]
            assert lookup.find(tokens) in ([runs[-1]] if runs else [0])
            tokens.append(token)


def test_guesses_are_trusted_by_how_often_they_came_true() -> None:
    guesser, text = Guesser(1000), array("i", [1, 2, 3, 4, 5, 6] * 2)
    before = guesser.chances(3)
    for token in [1, 2, 3, 4, 5, 6] * 4:
        guess = guesser.guess(text, [])
        assert guess[:3] == [(token - 1 + n) % 6 + 1 for n in range(3)]
        assert len(guess) == MAX_GUESSED
        text.append(token)
    right = guesser.chances(3)
    assert all(now > then for now, then in zip(right, before, strict=True))
    for token in range(100, 140):
        text.extend([4, 5, 6])
        guesser.guess(text, [])
        text.append(token)
    assert guesser.chances(1)[0] < 0.1


@pytest.mark.parametrize(
    ("token_s", "fixed_s", "is_worth_it"), [(0.001, 0.0, False), (0.0005, 0.004, True), (0.0, 0.00001, False)]
)
def test_drafts_are_made_where_they_cost_little(token_s: float, fixed_s: float, *, is_worth_it: bool) -> None:
    """A step that is as long as the gap behind it leaves nothing to gain. Few are tried nevertheless."""
    times = StepTiming()
    for num_tokens in (1, 64):
        times.note_plan(num_tokens, 0.0)
        times.note_result(num_tokens, fixed_s + token_s * num_tokens, 0.0)
    bench = Bench(drafting=Drafting(times), vocab_size=4, max_context=600)
    bench.forward_pass.forward = lambda batch: _next_of_three(bench.forward_pass, batch)
    bench.submit([1, 2, 3] * 6, 500)
    bench.run_dry()
    num_drafted = sum(batch.drafts is not None for batch in bench.executor.batches)
    assert num_drafted > 0
    assert (num_drafted > 0.5 * len(bench.executor.batches)) == is_worth_it
    assert is_worth_it or num_drafted < 0.05 * len(bench.executor.batches)
    bench.close()


def test_guess_of_the_grammar_goes_before_a_new_one_of_the_text_and_ends_with_it() -> None:
    guesser, text = Guesser(1000), array("i", [1, 2, 3, 4, 1, 2, 3])
    assert guesser.guess(text, [7, 8]) == [7, 8]
    text.append(7)
    assert guesser.guess(text, []) == [8]
    text.extend([8, 1, 2, 3])
    assert guesser.guess(text, [])[:3] == [7, 8, 1]
    text.append(5)
    assert guesser.guess(text, [6]) == [6]


class Eager(Drafting):
    """Drafts all guesses."""

    def __init__(self, texts: EarlierTexts | None = None) -> None:
        super().__init__(StepTiming(), texts)

    def _best_count(self, num_rows: int, chances: list[float]) -> int:
        return len(chances)


def test_forced_text_is_drafted_and_changes_no_token() -> None:
    compiler, answers = new_compiler(), []
    for drafting in (None, Eager()):
        bench = new_bench(compiler, drafting=drafting)
        ask(bench, 0, Grammar("regex", "one and two and [0-9]{4} and three"), 40)
        compile_all(bench)
        bench.run_dry()
        answers.append(text_of(bench, 0))
        assert (bench.board.drafted_tokens > 0) is (drafting is not None)
        bench.close()
    compiler.close()
    assert answers[0] == answers[1]


def test_answer_that_was_given_before_is_drafted_for_its_tenant_only() -> None:
    bench = Bench(page_size=16, drafting=Eager(EarlierTexts(64, 16)))
    accepted, answers = [], []
    for request_id, salt in enumerate((b"a" * 16, b"b" * 16, b"a" * 16)):
        before = bench.board.accepted_tokens
        bench.submit(list(range(1, 20)), 100, request_id=request_id, salt=salt)
        bench.run_dry()
        accepted.append(bench.board.accepted_tokens - before)
        answers.append(bench.received(request_id).token_ids)
    assert answers == [expected_tokens(list(range(1, 20)), 100, 97)] * 3
    assert accepted[:2] == [0, 0]
    assert accepted[2] > 60
    bench.close()


def _next_of_three(forward_pass: FakePass, batch: StepBatch) -> NDArray[np.float32]:
    """Logits of a pass that counts 1, 2, 3, 1, …"""
    tokens = forward_pass.begin_step(batch)[batch.logit_tokens]
    return np.eye(4, dtype=np.float32)[tokens % 3 + 1]
