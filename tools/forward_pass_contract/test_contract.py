"""The tests of the contract. Each runs steps as the engine would, and compares logits up to rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.backend.forward_pass import FROM_EMBEDDINGS, FROM_SLOT, SamplingParams, SlotInit, TokenLogprobs
from penstock.backend.forward_pass.extensions import IHostPages, IPersistsPages
from penstock.tools.forward_pass_contract.steps import (
    GREEDY,
    MAX_BATCH_TOKENS,
    NOT_ITS_OWN,
    NUM_PAGES,
    TOLERANCE,
    Floats,
    StepRow,
    StepRunner,
    is_same,
    page_size_of,
)


@pytest.fixture
def runner(forward_pass: Any) -> StepRunner:
    if not forward_pass.spec.generates:
        pytest.skip("this pass generates nothing")
    return StepRunner(forward_pass)


def test_spec_has_what_the_engine_needs(forward_pass: Any) -> None:
    spec = forward_pass.spec
    assert spec.vocab_size > 1
    assert spec.max_context_tokens >= 64
    assert spec.kv_bytes_per_token or not spec.generates
    assert spec.generates or spec.pooled
    assert all(num_bytes > 0 for num_bytes in spec.kv_bytes_per_token.values())


def test_logits_are_one_finite_row_per_row_that_has_them(runner: StepRunner) -> None:
    pages = runner.rng.permutation(NUM_PAGES).reshape(8, -1).tolist()
    init_tokens = np.zeros(1, np.int32)
    rows = [
        StepRow(
            runner.random_prompt(3 + slot), 0, pages[slot], slot, slot % 3 != 0, SlotInit(slot, GREEDY, init_tokens, 1)
        )
        for slot in range(8)
    ]
    logits, tokens = runner.step(rows)
    num_with_logits = sum(row.has_logits for row in rows)
    assert logits.shape == (num_with_logits, runner.forward_pass.spec.vocab_size)
    assert tokens.shape == (num_with_logits,)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
def test_prompt_in_chunks_gives_the_logits_of_the_whole_prompt(runner: StepRunner, chunk: int) -> None:
    prompt, pages = runner.random_prompt(37), runner.random_pages(37)
    whole, _ = runner.prefill(prompt, pages)
    chunked, _ = runner.prefill(prompt, runner.random_pages(37), chunk=chunk)
    assert is_same(whole, chunked)


def test_logits_depend_neither_on_the_order_of_pages_nor_on_their_old_content(runner: StepRunner) -> None:
    prompt, pages = runner.random_prompt(41), runner.random_pages(41)
    first, _ = runner.prefill(prompt, pages)
    runner.prefill(runner.random_prompt(44), pages)
    again, _ = runner.prefill(prompt, pages[::-1])
    assert is_same(first, again)


@pytest.mark.parametrize("num_copied", [1, 2, 3])
def test_row_continues_in_a_page_that_was_copied_for_it(runner: StepRunner, num_copied: int) -> None:
    """The source's owner writes to the source in the same step. Afterwards each sequence has its own page."""
    if runner.forward_pass.spec.state_bytes_per_sequence or runner.num_groups > 1:
        pytest.skip("no page is copied for a pass that keeps state or has several groups of layers")
    shuffled = runner.rng.permutation(NUM_PAGES).tolist()
    source, mine, expected_pages = shuffled[:8], shuffled[8:16], shuffled[16:24]
    page_size = page_size_of(runner.forward_pass)
    common = runner.random_prompt(2 * page_size + num_copied)
    prompts = [common + runner.random_prompt(9), common + runner.random_prompt(7)]
    inits = [SlotInit(slot, GREEDY, np.array(prompts[slot], np.int32), len(prompts[slot])) for slot in (0, 1)]
    expected = [runner.prefill(prompt, expected_pages)[0].copy() for prompt in prompts]
    runner.prefill(runner.random_prompt(3 * page_size), mine)  # the destination's old content
    start = len(common)
    runner.step([StepRow(common, 0, source, 0, False, inits[0])])
    destination = mine[2]
    rows = [
        StepRow(prompts[0][start:], start, source, 0),
        StepRow(prompts[1][start:], start, [*source[:2], destination, *mine[3:]], 1, True, inits[1]),
    ]
    logits, _ = runner.step(rows, ((source[2], destination),))
    assert is_same(logits[0], expected[0])
    assert is_same(logits[1], expected[1])


def test_row_continues_in_pages_that_were_saved_to_the_host(runner: StepRunner) -> None:
    """Pages and host pages are overwritten as early as the engine may do it; one restored page is copied as well."""
    forward_pass = runner.forward_pass
    shares_pages = not forward_pass.spec.state_bytes_per_sequence and runner.num_groups == 1
    if not (shares_pages and isinstance(forward_pass, IHostPages)) or forward_pass.num_host_pages < 3:
        pytest.skip("the pass keeps no pages on the host here")
    page_size = page_size_of(forward_pass)
    shuffled = runner.rng.permutation(NUM_PAGES).tolist()
    first, second, elsewhere = shuffled[:3], shuffled[3:6], shuffled[6:9]
    prompt, other = runner.random_prompt(3 * page_size), runner.random_prompt(3 * page_size)
    expected, _ = runner.prefill(prompt, second)
    host_pages = [forward_pass.num_host_pages - 1, 0, 1]
    runner.prefill(prompt[:-1], first)
    forward_pass.save_pages(tuple(zip(first, host_pages, strict=True)))
    runner.prefill(other, first)
    restores = ((host_pages[0], elsewhere[0]), (host_pages[1], second[1]), (host_pages[2], elsewhere[2]))
    row = StepRow(prompt[-1:], len(prompt) - 1, elsewhere, 0)
    logits, _ = runner.step([row], ((second[1], elsewhere[1]),), restores)
    forward_pass.save_pages(tuple(zip(first, host_pages, strict=True)))
    again, _ = runner.step([row])
    assert is_same(logits[0], expected)
    assert is_same(again[0], expected)


def test_row_goes_on_from_a_checkpoint_that_the_same_step_overwrites(runner: StepRunner) -> None:
    """A checkpoint is read before the step, and written after it, while its source goes on."""
    forward_pass = runner.forward_pass
    if not forward_pass.spec.copies_states:
        pytest.skip("the pass keeps no checkpoints of states")
    page_size = page_size_of(forward_pass)
    start = 2 * page_size
    shuffled = runner.rng.permutation(NUM_PAGES).tolist()
    theirs, mine, others = shuffled[:6], [*shuffled[:2], *shuffled[6:10]], shuffled[10:16]
    prompt, other = runner.random_prompt(start + 7), runner.random_prompt(start + 5)
    expected, _ = runner.prefill(prompt, shuffled[16:24])
    others_expected, _ = runner.prefill(other, shuffled[16:24])
    inits = [SlotInit(slot, GREEDY, np.array(prompt, np.int32), len(prompt)) for slot in range(4)]
    rows = [StepRow(prompt[:start], 0, theirs, 3, False, inits[3]), StepRow(other[:3], 0, others, 1, False, inits[1])]
    runner.step(rows, state_saves=((3, 2),))
    runner.step([StepRow(runner.random_prompt(3), start, theirs, 3), StepRow(other[3:start], 3, others, 1)])
    rows = [
        StepRow(prompt[start:], start, mine, 0, True, inits[0]),
        StepRow([other[start]], start, others, 1),
        StepRow(runner.random_prompt(2), start + 3, theirs, 3),
    ]
    logits, _ = runner.step(rows, state_restores=((2, 0),), state_saves=((1, 2),))
    assert is_same(logits[0], expected)
    runner.step([StepRow([7], start + 1, others, 1)])
    checkpoint = 2
    page_restores: tuple[tuple[int, int], ...] = ()
    if isinstance(forward_pass, IPersistsPages) and isinstance(forward_pass, IHostPages):  # by way of the host
        first, place = NUM_PAGES * runner.num_groups, forward_pass.num_host_pages
        forward_pass.save_pages(((first + checkpoint, place),))
        runner.step([StepRow([7], start + 2, others, 1)], state_saves=((1, checkpoint),))
        checkpoint, page_restores = 1, ((place, first + 1),)
    row = StepRow(other[start + 1 :], start + 1, others, 2, True, inits[2])
    logits, _ = runner.step([row], (), page_restores, ((checkpoint, 2),))
    assert is_same(logits[0], others_expected)


def test_pages_behind_the_windows_are_not_read(runner: StepRunner) -> None:
    """In a step of several tokens and in one of a single token; each group's pages pass at their own time."""
    spec, page_size = runner.forward_pass.spec, page_size_of(runner.forward_pass)
    windows = [window for window in spec.kv_windows if window is not None]
    length = max(windows, default=0) + 3 * page_size
    if not windows or length + 6 > min(spec.max_context_tokens, MAX_BATCH_TOKENS, NUM_PAGES * page_size // 2):
        pytest.skip("no window of this pass is shorter than a step")
    prompt = runner.random_prompt(length + 6)
    expected = [runner.prefill(prompt[:end], runner.random_pages(end))[0].copy() for end in (length + 5, length + 6)]
    runner.prefill(runner.random_prompt(page_size), [NOT_ITS_OWN], slot=1)
    pages = [page for page in runner.rng.permutation(NUM_PAGES).tolist() if page != NOT_ITS_OWN]
    init = SlotInit(0, GREEDY, np.array(prompt, np.int32), len(prompt))
    runner.step([StepRow(prompt[:length], 0, pages[: NUM_PAGES // 2], 0, False, init)])
    found = []
    for start, end in ((length, length + 5), (length + 5, length + 6)):
        passed = tuple((max(0, start - (window or start + 1) + 1)) // page_size for window in spec.kv_windows)
        row = StepRow(prompt[start:end], start, pages[: NUM_PAGES // 2], 0, passed=passed)
        found.append(runner.step([row])[0][0].copy())
    assert max(passed) >= 2
    assert is_same(found[0], expected[0])
    assert is_same(found[1], expected[1])


def test_known_tokens_are_scored_whatever_the_chunks_and_the_other_rows_are(runner: StepRunner) -> None:
    if not runner.forward_pass.spec.scores_prompts:
        pytest.skip("this pass scores no prompts")
    prompt, num_tokens = runner.random_prompt(24), 24
    logits = [runner.prefill(prompt[:end], runner.random_pages(end))[0].copy() for end in range(1, num_tokens)]
    shuffled = runner.rng.permutation(NUM_PAGES).tolist()
    pages = [shuffled[20 * slot : 20 * slot + 20] for slot in range(3)]
    inits = [SlotInit(slot, GREEDY, np.array(prompt, np.int32), num_tokens) for slot in range(3)]
    others = runner.random_prompt(9)
    steps = [  # the prompt's rows are the last ones with more than one token
        [StepRow(prompt[:10], 0, pages[0], 0, False, inits[0], None, prompt[1:11])],
        [StepRow([prompt[10]], 10, pages[0], 0, False, None, None, prompt[11:12])],
        [
            StepRow(others[:1], 0, pages[1], 1, True, inits[1]),
            StepRow(others[1:], 0, pages[2], 2, True, inits[2]),
            StepRow(prompt[11:], 11, pages[0], 0, True, None, None, prompt[12:]),
        ],
    ]
    found = []
    for rows in steps:
        runner.step(rows)
        assert runner.scored is not None
        assert runner.scored.rows.tolist() == list(range(len(rows[-1].next_ids)))
        found.append(runner.scored)
    _assert_scores(found, logits, prompt[1:], runner.num_top)


def _assert_scores(found: list[TokenLogprobs], logits: list[Floats], next_ids: list[int], num_top: int) -> None:
    exact = np.array(logits, np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    chosen = exact[np.arange(len(next_ids)), next_ids]
    assert np.abs(np.concatenate([part.chosen for part in found]) - chosen).max() <= TOLERANCE
    ranks = np.concatenate([part.ranks for part in found])
    assert (ranks <= (exact >= chosen[:, None] - TOLERANCE).sum(axis=1)).all()
    assert (ranks >= (exact >= chosen[:, None] + TOLERANCE).sum(axis=1)).all()
    top_ids = np.concatenate([part.top_ids for part in found])
    top = np.concatenate([part.top for part in found])
    width = min(num_top, exact.shape[1])
    assert top_ids.shape == top.shape == (len(next_ids), width)
    assert np.abs(top + np.sort(-exact, axis=1)[:, :width]).max() <= TOLERANCE
    assert np.abs(top - np.take_along_axis(exact, top_ids, axis=1)).max() <= TOLERANCE


def test_row_does_not_depend_on_the_other_rows(runner: StepRunner) -> None:
    prompt = runner.random_prompt(21)
    alone, _ = runner.prefill(prompt[:20], runner.random_pages(20))
    alone_next, _ = runner.prefill(prompt, runner.random_pages(21))
    shuffled = runner.rng.permutation(NUM_PAGES).tolist()
    pages = [shuffled[12 * slot : 12 * slot + 12] for slot in range(16)]
    inits = [SlotInit(slot, GREEDY, np.zeros(1, np.int32), 1) for slot in range(16)]
    rows = [StepRow(runner.random_prompt(1 + 2 * slot), 0, pages[slot], slot, True, inits[slot]) for slot in range(15)]
    mine = StepRow(prompt[:20], 0, pages[15], 15, True, inits[15])
    logits, _ = runner.step([*rows[:7], mine, *rows[7:]])
    assert is_same(alone, logits[7])
    nexts = [StepRow(runner.random_prompt(1), 1 + 2 * slot, pages[slot], slot) for slot in range(15)]
    logits, _ = runner.step([*nexts[:3], StepRow([prompt[20]], 20, pages[15], 15), *nexts[3:]])
    assert is_same(alone_next, logits[3])


def test_sequence_waits_between_its_rows_and_begins_again_in_its_slot(runner: StepRunner) -> None:
    """As after an error: the second beginning finds what the first has left in the slot and the pages."""
    prompt, other = runner.random_prompt(22), runner.random_prompt(12)
    expected, _ = runner.prefill(prompt, runner.random_pages(22))
    others_expected, _ = runner.prefill(other, runner.random_pages(12))
    shuffled = runner.rng.permutation(NUM_PAGES).tolist()
    pages, others_pages = shuffled[:12], shuffled[12:24]
    init = SlotInit(7, GREEDY, np.array(prompt, np.int32), len(prompt))
    others_init = SlotInit(2, GREEDY, np.array(other, np.int32), len(other))
    runner.step([StepRow(prompt[:13], 0, pages, 7, False, init)])
    runner.step([StepRow(other[:5], 0, others_pages, 2, False, others_init)])
    runner.step([StepRow([prompt[13]], 13, pages, 7), StepRow([other[5]], 5, others_pages, 2)])
    runner.step([StepRow(prompt[:18], 0, pages, 7, False, init)])
    runner.step([StepRow([other[6]], 6, others_pages, 2, False)])
    runner.step([StepRow([prompt[18]], 18, pages, 7), StepRow(other[7:11], 7, others_pages, 2, False)])
    logits, _ = runner.step([StepRow(prompt[19:], 19, pages, 7), StepRow(other[11:], 11, others_pages, 2)])
    assert is_same(logits[0], expected)
    assert is_same(logits[1], others_expected)


def test_greedy_takes_the_largest_logit_and_from_slot_repeats_it(runner: StepRunner) -> None:
    prompt, pages = runner.random_prompt(9), runner.random_pages(16)
    logits, token = runner.prefill(prompt, pages, slot=5)
    assert token == int(logits.argmax())
    by_slot, _ = runner.step([StepRow([FROM_SLOT], 9, pages, 5)])
    runner.prefill(prompt, pages, slot=5)  # a state does not go back
    by_id, _ = runner.step([StepRow([token], 9, pages, 5)])
    assert is_same(by_slot[0], by_id[0])


def test_log_probabilities_are_those_of_the_top_tokens_or_of_the_named_ones(runner: StepRunner) -> None:
    named = tuple(range(runner.forward_pass.spec.vocab_size - 1, -1, -3))[:128]
    params = [
        SamplingParams(temperature=0.0, num_logprobs=2),
        GREEDY,
        SamplingParams(temperature=0.8, top_k=3, seed=5, num_logprobs=0, logprob_token_ids=named),
    ]
    pages = runner.rng.permutation(NUM_PAGES).tolist()
    inits = [SlotInit(slot, sampling, np.zeros(1, np.int32), 1) for slot, sampling in enumerate(params)]
    prompts = [runner.random_prompt(5) for _ in params]
    rows = [StepRow(prompts[slot], 0, pages[8 * slot : 8 * slot + 8], slot, True, inits[slot]) for slot in range(3)]
    logits, tokens = runner.step(rows)
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    found = runner.logprobs
    assert found is not None
    assert found.rows.tolist() == [0, 2]
    assert np.abs(found.chosen - exact[[0, 2], tokens[[0, 2]]]).max() <= TOLERANCE
    assert np.abs(found.top[0, :2] + np.sort(-exact[0])[:2]).max() <= TOLERANCE
    assert found.top_ids[1, : len(named)].tolist() == list(named)
    assert np.abs(found.top[1, : len(named)] - exact[2, list(named)]).max() <= TOLERANCE


def test_seeded_draw_depends_neither_on_slot_nor_pages_nor_chunks(runner: StepRunner) -> None:
    sampling = SamplingParams(temperature=1.5, top_p=0.95, seed=4242)
    prompt = runner.random_prompt(18)
    drawn = {
        runner.prefill(prompt, runner.random_pages(18), slot=slot, chunk=chunk, sampling=sampling)[1]
        for slot, chunk in ((0, 100), (7, 100), (19, 100), (3, 5), (4, 1))
    }
    assert len(drawn) == 1


def test_dry_keeps_a_token_from_continuing_a_repetition(runner: StepRunner) -> None:
    if not runner.forward_pass.spec.has_llama_cpp_sampling:
        pytest.skip("this pass does not know it")
    prompt = runner.random_prompt(9)
    text = [*prompt, 3, *prompt]
    likes = replace(GREEDY, dry_multiplier=100.0, dry_base=100.0, logit_bias=((3, 90.0),))
    for sampling, repeats in ((likes, False), (replace(likes, dry_penalty_last_n=9), True)):
        _, token = runner.prefill(text, runner.random_pages(len(text)), sampling=sampling)
        assert (token == 3) == repeats


def test_prompt_of_embeddings_depends_neither_on_chunks_nor_on_other_rows(runner: StepRunner) -> None:
    if not (embedding_size := runner.forward_pass.spec.embedding_size):
        pytest.skip("this pass takes no embeddings")
    given = runner.rng.normal(0.0, 0.3, (19, embedding_size)).astype(np.float32)
    whole = runner.prefill_embeddings(given, runner.random_pages(19), 19)
    assert not is_same(whole, runner.prefill_embeddings(given[::-1].copy(), runner.random_pages(19), 19))
    for chunk in (1, 4, 7):
        assert is_same(whole, runner.prefill_embeddings(given, runner.random_pages(19), chunk))
    shuffled = runner.rng.permutation(NUM_PAGES).tolist()
    pages = [shuffled[20 * slot : 20 * slot + 20] for slot in range(5)]
    inits = [SlotInit(slot, GREEDY, np.zeros(1, np.int32), 1) for slot in range(5)]
    x = FROM_EMBEDDINGS
    rows = [
        StepRow(runner.random_prompt(1), 0, pages[0], 0, True, inits[0]),
        StepRow([x], 0, pages[1], 1, True, inits[1], given[:1]),
        StepRow(runner.random_prompt(5), 0, pages[2], 2, True, inits[2]),
        StepRow([x] * 19, 0, pages[3], 3, True, inits[3], given),
        StepRow([x] * 9, 0, pages[4], 4, False, inits[4], given[:9]),
    ]
    logits, _ = runner.step(rows)
    assert is_same(whole, logits[3])
    assert is_same(runner.prefill_embeddings(given[:1], runner.random_pages(1), 1), logits[1])
    token = runner.random_prompt(1)
    after, _ = runner.step([StepRow(token, 19, pages[3], 3), StepRow([x] * 10, 9, pages[4], 4, True, None, given[9:])])
    assert is_same(whole, after[1])
    init = SlotInit(3, GREEDY, np.full(19, x, np.int32), 19)
    runner.step([StepRow([x] * 19, 0, pages[0], 3, True, init, given)])
    again, _ = runner.step([StepRow(token, 19, pages[0], 3)])
    assert is_same(after[0], again[0])


def test_slots_keep_their_sequences_apart(runner: StepRunner) -> None:
    pages = runner.rng.permutation(NUM_PAGES).tolist()
    halves = (pages[:100], pages[100:200])
    prompts = runner.random_prompt(12), runner.random_prompt(15)
    tokens = [runner.prefill(prompts[slot], halves[slot], slot)[1] for slot in (0, 1)]
    expected = [
        runner.step([StepRow([tokens[slot]], len(prompts[slot]), halves[slot], slot)])[0][0].copy() for slot in (0, 1)
    ]
    for slot in (0, 1):
        runner.prefill(prompts[slot], halves[slot], slot)
    logits, _ = runner.step([StepRow([FROM_SLOT], len(prompts[slot]), halves[slot], slot) for slot in (1, 0)])
    assert is_same(logits[0], expected[1])
    assert is_same(logits[1], expected[0])
