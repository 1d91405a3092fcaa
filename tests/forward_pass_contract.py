"""What the engine relies on, for any forward pass: pytest tests/forward_pass_contract.py --forward-pass pkg.mod:Class

Without the option it runs for the passes of this project. With --model DIR the pass loads that checkpoint, otherwise
none. Comparisons are in fp32 where the pass offers it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.backend.forward_pass import (
    FROM_EMBEDDINGS,
    FROM_SLOT,
    EmbeddedTokens,
    IBatchedForwardPass,
    IHostPages,
    IPromptEmbeddings,
    PassOptions,
    SamplingParams,
    SlotInit,
    StepBatch,
)
from penstock.backend.plugins import find_forward_pass
from penstock.tools.gpu_check.checks.pass_agreement import RowsOnHost
from tests.checkpoints import make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

PAGE_SIZE = 4
"""Where the pass takes any; small, so that sequences have many pages."""
NUM_PAGES = 256
MAX_RUNNING = 20
MAX_BATCH_TOKENS = 512
HOST_KV_BYTES = 64 << 20
"""Where the pass keeps pages on the host, and finds that quicker than computing them again."""
TOLERANCE = 1e-3
GREEDY = SamplingParams(temperature=0.0)
_EMULATED = "tests.backend.passes.decoder.cuda.emulated_pass:EmulatedCudaPass"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pass_name" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--forward-pass")
        own = [("fake", None), ("decoder", None), ("decoder", "q8_0"), (_EMULATED, None)]
        passes = [(chosen, None)] if chosen else own
        metafunc.parametrize(("pass_name", "kv_dtype"), passes, scope="module")


@pytest.fixture(scope="module")
def forward_pass(
    pass_name: str, kv_dtype: str | None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    model_dir: Path | None = request.config.getoption("--model")
    if pass_name in ("decoder", _EMULATED) and model_dir is None:
        head_dim = 32 if pass_name == "decoder" else 64
        model_dir = make_checkpoint("llama3", tmp_path_factory.mktemp("contract"), head_dim=head_dim)
    options = PassOptions(
        dtype="fp32", max_running=MAX_RUNNING, max_batch_tokens=MAX_BATCH_TOKENS, host_kv_bytes=HOST_KV_BYTES
    )
    loaded = find_forward_pass(pass_name).load(model_dir, options)
    kv_dtypes = list(loaded.spec.kv_bytes_per_token)
    loaded.create_cache(NUM_PAGES, page_size_of(loaded), kv_dtype or ("fp32" if "fp32" in kv_dtypes else kv_dtypes[0]))
    yield loaded
    loaded.close()


def page_size_of(forward_pass: IBatchedForwardPass) -> int:
    return min(forward_pass.spec.page_sizes, default=PAGE_SIZE)


@dataclass
class Part:
    """One row: token_ids from position `start` on, in a sequence that holds these pages and this slot."""

    token_ids: list[int]
    start: int
    pages: list[int]
    slot: int
    wants_logits: bool = True
    init: SlotInit | None = None
    embeddings: np.ndarray | None = None
    """Of all the token_ids, which are FROM_EMBEDDINGS then."""


@dataclass
class Run:
    """The steps of a pass: hands out pages and slots, builds batches."""

    forward_pass: IBatchedForwardPass
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def pages(self, num_tokens: int) -> list[int]:
        return self.rng.permutation(NUM_PAGES)[: -(-num_tokens // page_size_of(self.forward_pass))].tolist()

    def prompt(self, num_tokens: int) -> list[int]:
        return self.rng.integers(0, self.forward_pass.spec.vocab_size, num_tokens).tolist()

    def step(
        self,
        parts: list[Part],
        page_copies: tuple[tuple[int, int], ...] = (),
        page_restores: tuple[tuple[int, int], ...] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits and sampled tokens of the rows that want them, in the order of parts."""
        order = sorted(range(len(parts)), key=lambda index: len(parts[index].token_ids) > 1)
        rows = [parts[index] for index in order]
        lengths = [len(row.token_ids) for row in rows]
        width = max(len(row.pages) for row in rows)
        batch = StepBatch(
            input_ids=np.array([token for row in rows for token in row.token_ids], np.int32),
            query_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            context_lens=np.array([row.start for row in rows], np.int32),
            page_table=np.array([row.pages + [0] * (width - len(row.pages)) for row in rows], np.int32),
            slots=np.array([row.slot for row in rows], np.int32),
            logit_rows=np.array([i for i, row in enumerate(rows) if row.wants_logits], np.int32),
            slot_inits=tuple(row.init for row in rows if row.init),
            page_copies=page_copies,
            page_restores=page_restores,
            embeddings=tuple(
                EmbeddedTokens(sum(lengths[:index]), RowsOnHost(row.embeddings))
                for index, row in enumerate(rows)
                if row.embeddings is not None
            ),
        )
        logits = self.forward_pass.forward(batch)
        host = np.array(self.forward_pass.host_logits(logits), np.float32)
        tokens = np.array(self.forward_pass.sample(logits, batch).wait().token_ids)
        back = np.argsort([order[row] for row in batch.logit_rows])
        return host[back], tokens[back]

    def prefill(
        self, prompt: list[int], pages: list[int], slot: int = 0, chunk: int = 10**6, sampling: SamplingParams = GREEDY
    ) -> tuple[np.ndarray, int]:
        """Logits of the prompt's last token, [V], and the token sampled from them."""
        init = SlotInit(slot, sampling, np.array(prompt, np.int32), len(prompt))
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            is_last = start + chunk >= len(prompt)
            logits, tokens = self.step([Part(part, start, pages, slot, is_last, init if start == 0 else None)])
        return logits[0], int(tokens[0])

    def prefill_embedded(self, rows: np.ndarray, pages: list[int], chunk: int) -> np.ndarray:
        """As `prefill`, in slot 0."""
        x = FROM_EMBEDDINGS
        init: SlotInit | None = SlotInit(0, GREEDY, np.full(len(rows), x, np.int32), len(rows))
        for start in range(0, len(rows), chunk):
            part = rows[start : start + chunk]
            is_last = start + chunk >= len(rows)
            logits, _ = self.step([Part([x] * len(part), start, pages, 0, is_last, init, part)])
            init = None
        last: np.ndarray = logits[0]
        return last


@pytest.fixture
def run(forward_pass: IBatchedForwardPass) -> Run:
    return Run(forward_pass)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a - b).max() <= TOLERANCE and a.argmax() == b.argmax())


def test_the_spec_says_what_the_engine_needs(run: Run) -> None:
    spec = run.forward_pass.spec
    assert spec.vocab_size > 1
    assert spec.max_context_tokens >= 64
    assert spec.kv_bytes_per_token
    assert all(num_bytes > 0 for num_bytes in spec.kv_bytes_per_token.values())


def test_logits_are_one_finite_row_for_each_row_that_wants_them(run: Run) -> None:
    pages = run.rng.permutation(NUM_PAGES).reshape(8, -1).tolist()
    parts = [
        Part(
            run.prompt(3 + slot), 0, pages[slot], slot, slot % 3 != 0, SlotInit(slot, GREEDY, np.zeros(1, np.int32), 1)
        )
        for slot in range(8)
    ]
    logits, tokens = run.step(parts)
    wanting = sum(part.wants_logits for part in parts)
    assert logits.shape == (wanting, run.forward_pass.spec.vocab_size)
    assert tokens.shape == (wanting,)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
def test_a_prompt_in_chunks_gives_what_it_gives_whole(run: Run, chunk: int) -> None:
    prompt, pages = run.prompt(37), run.pages(37)
    whole, _ = run.prefill(prompt, pages)
    chunked, _ = run.prefill(prompt, run.pages(37), chunk=chunk)
    assert same(whole, chunked)


def test_the_order_of_pages_does_not_matter_nor_what_they_held(run: Run) -> None:
    prompt, pages = run.prompt(41), run.pages(41)
    first, _ = run.prefill(prompt, pages)
    run.prefill(run.prompt(44), pages)
    again, _ = run.prefill(prompt, pages[::-1])
    assert same(first, again)


@pytest.mark.parametrize("num_copied", [1, 2, 3])
def test_a_row_goes_on_within_a_page_that_was_copied_for_it(run: Run, num_copied: int) -> None:
    """The source's owner, in the same step, writes to the source; both go their own ways afterwards."""
    shuffled = run.rng.permutation(NUM_PAGES).tolist()
    source, mine, expected_pages = shuffled[:8], shuffled[8:16], shuffled[16:24]
    page_size = page_size_of(run.forward_pass)
    common = run.prompt(2 * page_size + num_copied)
    prompts = [common + run.prompt(9), common + run.prompt(7)]
    inits = [SlotInit(slot, GREEDY, np.array(prompts[slot], np.int32), len(prompts[slot])) for slot in (0, 1)]
    expected = [run.prefill(prompt, expected_pages)[0].copy() for prompt in prompts]
    run.prefill(run.prompt(3 * page_size), mine)  # what the destination held before
    start = len(common)
    run.step([Part(common, 0, source, 0, False, inits[0])])
    destination = mine[2]
    parts = [
        Part(prompts[0][start:], start, source, 0),
        Part(prompts[1][start:], start, [*source[:2], destination, *mine[3:]], 1, True, inits[1]),
    ]
    logits, _ = run.step(parts, ((source[2], destination),))
    assert same(logits[0], expected[0])
    assert same(logits[1], expected[1])


def test_a_row_goes_on_in_pages_that_were_kept_on_the_host(run: Run) -> None:
    """They and their places are overwritten as soon as they may be; one of them comes back to be copied from."""
    forward_pass = run.forward_pass
    if not isinstance(forward_pass, IHostPages) or forward_pass.num_host_pages < 3:
        pytest.skip("the pass keeps no pages on the host here")
    page_size = page_size_of(forward_pass)
    shuffled = run.rng.permutation(NUM_PAGES).tolist()
    first, second, elsewhere = shuffled[:3], shuffled[3:6], shuffled[6:9]
    prompt, other = run.prompt(3 * page_size), run.prompt(3 * page_size)
    expected, _ = run.prefill(prompt, second)
    places = [forward_pass.num_host_pages - 1, 0, 1]
    run.prefill(prompt[:-1], first)
    forward_pass.save_pages(tuple(zip(first, places, strict=True)))
    run.prefill(other, first)
    restores = ((places[0], elsewhere[0]), (places[1], second[1]), (places[2], elsewhere[2]))
    part = Part(prompt[-1:], len(prompt) - 1, elsewhere, 0)
    logits, _ = run.step([part], ((second[1], elsewhere[1]),), restores)
    forward_pass.save_pages(tuple(zip(first, places, strict=True)))
    again, _ = run.step([part])
    assert same(logits[0], expected)
    assert same(again[0], expected)


def test_a_row_does_not_depend_on_the_rows_beside_it(run: Run) -> None:
    prompt = run.prompt(21)
    alone, _ = run.prefill(prompt[:20], run.pages(20))
    alone_next, _ = run.prefill(prompt, run.pages(21))
    shuffled = run.rng.permutation(NUM_PAGES).tolist()
    pages = [shuffled[12 * slot : 12 * slot + 12] for slot in range(16)]
    inits = [SlotInit(slot, GREEDY, np.zeros(1, np.int32), 1) for slot in range(16)]
    parts = [Part(run.prompt(1 + 2 * slot), 0, pages[slot], slot, True, inits[slot]) for slot in range(15)]
    mine = Part(prompt[:20], 0, pages[15], 15, True, inits[15])
    logits, _ = run.step([*parts[:7], mine, *parts[7:]])
    assert same(alone, logits[7])
    nexts = [Part(run.prompt(1), 1 + 2 * slot, pages[slot], slot) for slot in range(15)]
    logits, _ = run.step([*nexts[:3], Part([prompt[20]], 20, pages[15], 15), *nexts[3:]])
    assert same(alone_next, logits[3])


def test_greedy_takes_the_largest_logit_and_from_slot_stands_for_it(run: Run) -> None:
    prompt, pages = run.prompt(9), run.pages(16)
    logits, token = run.prefill(prompt, pages, slot=5)
    assert token == int(logits.argmax())
    by_slot, _ = run.step([Part([FROM_SLOT], 9, pages, 5)])
    by_name, _ = run.step([Part([token], 9, pages, 5)])
    assert same(by_slot[0], by_name[0])


def test_a_seeded_draw_depends_on_neither_slot_nor_pages_nor_chunks(run: Run) -> None:
    sampling = SamplingParams(temperature=1.5, top_p=0.95, seed=4242)
    prompt = run.prompt(18)
    drawn = {
        run.prefill(prompt, run.pages(18), slot=slot, chunk=chunk, sampling=sampling)[1]
        for slot, chunk in ((0, 100), (7, 100), (19, 100), (3, 5), (4, 1))
    }
    assert len(drawn) == 1


def test_a_prompt_of_embeddings_does_not_depend_on_chunks_nor_on_rows_beside_it(run: Run) -> None:
    if not isinstance(run.forward_pass, IPromptEmbeddings):
        pytest.skip("this pass takes no embeddings")
    given = run.rng.normal(0.0, 0.3, (19, run.forward_pass.embedding_size)).astype(np.float32)
    whole = run.prefill_embedded(given, run.pages(19), 19)
    assert not same(whole, run.prefill_embedded(given[::-1].copy(), run.pages(19), 19))
    for chunk in (1, 4, 7):
        assert same(whole, run.prefill_embedded(given, run.pages(19), chunk))
    shuffled = run.rng.permutation(NUM_PAGES).tolist()
    pages = [shuffled[20 * slot : 20 * slot + 20] for slot in range(5)]
    inits = [SlotInit(slot, GREEDY, np.zeros(1, np.int32), 1) for slot in range(5)]
    x = FROM_EMBEDDINGS
    parts = [
        Part(run.prompt(1), 0, pages[0], 0, True, inits[0]),
        Part([x], 0, pages[1], 1, True, inits[1], given[:1]),
        Part(run.prompt(5), 0, pages[2], 2, True, inits[2]),
        Part([x] * 19, 0, pages[3], 3, True, inits[3], given),
        Part([x] * 9, 0, pages[4], 4, False, inits[4], given[:9]),
    ]
    logits, _ = run.step(parts)
    assert same(whole, logits[3])
    assert same(run.prefill_embedded(given[:1], run.pages(1), 1), logits[1])
    token = run.prompt(1)
    after, _ = run.step([Part(token, 19, pages[3], 3), Part([x] * 10, 9, pages[4], 4, True, None, given[9:])])
    assert same(whole, after[1])
    init = SlotInit(3, GREEDY, np.full(19, x, np.int32), 19)
    run.step([Part([x] * 19, 0, pages[0], 3, True, init, given)])
    again, _ = run.step([Part(token, 19, pages[0], 3)])
    assert same(after[0], again[0])


def test_slots_keep_their_sequences_apart(run: Run) -> None:
    pages = run.rng.permutation(NUM_PAGES).tolist()
    halves = (pages[:100], pages[100:200])
    prompts = run.prompt(12), run.prompt(15)
    tokens = [run.prefill(prompts[slot], halves[slot], slot)[1] for slot in (0, 1)]
    expected = [
        run.step([Part([tokens[slot]], len(prompts[slot]), halves[slot], slot)])[0][0].copy() for slot in (0, 1)
    ]
    for slot in (0, 1):
        run.prefill(prompts[slot], halves[slot], slot)
    logits, _ = run.step([Part([FROM_SLOT], len(prompts[slot]), halves[slot], slot) for slot in (1, 0)])
    assert same(logits[0], expected[1])
    assert same(logits[1], expected[0])
