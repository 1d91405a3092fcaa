"""Steps arrive on the device as the host sent them, and page tables are updated by changes only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import FROM_SLOT, StepBatch
from penstock.backend.passes.cpu.library.native_library import LibraryUnavailableError
from penstock.backend.passes.cuda.step import step_buffers
from penstock.backend.passes.cuda.step.step_buffers import StepBuffers
from penstock.backend.passes.cuda.step.step_packing import MixedPadding, StepLimits
from penstock.backend.passes.decoder.cuda_pass import step_library
from penstock.backend.passes.decoder.cuda_pass.step_library import open_step_library
from tests.backend.passes.cuda.emulated_device import EmulatedDevice, RecordingLauncher
from tests.cuda_emulator.launcher import EmulatedLauncher, Order

LIMITS = StepLimits(
    max_rows=6, max_tokens=40, max_pages=8, page_size_tokens=4, num_pages=50, vocab_size=100, tail_ints=20
)


def make_buffers(limits: StepLimits = LIMITS, launcher: EmulatedLauncher | None = None) -> StepBuffers:
    device = EmulatedDevice()
    if launcher is not None:
        device.launcher = RecordingLauncher(launcher)
    device.launcher.prepare(step_buffers.kernels())
    return StepBuffers(device, limits, open_step_library())


def make_batch(
    rows: list[tuple[int, int, int]],
    *,
    seed: int = 0,
    wanting: list[int] | None = None,
    max_pages: int = LIMITS.max_pages,
) -> StepBatch:
    """Make a batch of rows (slot, context, tokens) with random pages; page table entries beyond them are poisoned."""
    rng = np.random.default_rng(seed)
    slots, contexts, lengths = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    table = np.full((len(rows), max_pages), 10**6, np.int32)
    for row, end in enumerate(contexts + lengths):
        count = -(-end // LIMITS.page_size_tokens)
        table[row, :count] = rng.integers(0, LIMITS.num_pages, count)
    return StepBatch(
        input_ids=rng.integers(0, LIMITS.vocab_size, lengths.sum()).astype(np.int32),
        query_starts=np.cumsum([0, *lengths]).astype(np.int32),
        context_lens=contexts,
        page_table=table,
        slots=slots,
        logit_rows=np.array(range(len(rows)) if wanting is None else wanting, np.int32),
    )


def expect_arrived(buffers: StepBuffers, batch: StepBatch) -> None:
    rows = buffers.rows.cut(batch.num_rows)
    assert buffers.input_ids[: batch.num_tokens].tolist() == batch.input_ids.tolist()
    assert rows.query_starts.tolist() == batch.query_starts.tolist()
    assert rows.context_lens.tolist() == batch.context_lens.tolist()
    assert rows.slots.tolist() == batch.slots.tolist()
    wanting = batch.logit_rows
    logit_rows = buffers.logit_rows.cut(len(wanting))
    assert logit_rows.query_starts.tolist() == list(range(len(wanting) + 1))
    assert logit_rows.slots.tolist() == batch.slots[wanting].tolist()
    last = batch.context_lens + np.diff(batch.query_starts) - 1
    assert logit_rows.context_lens.tolist() == last[wanting].tolist()
    assert buffers.logit_tokens[: len(wanting)].tolist() == (batch.query_starts[1:][wanting] - 1).tolist()
    for row, slot in enumerate(batch.slots.tolist()):
        count = last[row] // LIMITS.page_size_tokens + 1
        found = buffers.page_tables[:, slot, :count]
        assert found.T.squeeze(1).tolist() == batch.page_table[row, :count].tolist()


_rows = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 24), st.integers(1, 6)),
    min_size=1,
    max_size=6,
    unique_by=lambda x: x[0],
)


@settings(max_examples=40)
@given(st.lists(_rows, min_size=1, max_size=4))
def test_every_step_arrives_after_any_other_steps(steps: list[list[tuple[int, int, int]]]) -> None:
    buffers = make_buffers()
    for index, rows in enumerate(steps):
        batch = make_batch(rows, seed=index, wanting=list(range(0, len(rows), 2)))
        buffers.load(batch, 0, [])
        expect_arrived(buffers, batch)


def test_each_group_of_layers_has_a_table_of_its_own_and_only_changes_are_sent() -> None:
    buffers = make_buffers(replace(LIMITS, num_groups=3))
    batch = make_batch([(4, 9, 3), (1, 2, 1)], seed=2)
    tables = np.stack([batch.page_table, (batch.page_table + 7) % 50, (batch.page_table + 20) % 50], axis=2)
    grouped = replace(batch, page_table=tables.astype(np.int32))
    buffers.load(grouped, 0, [])
    expect_arrived(buffers, grouped)
    buffers.page_tables.fill_(-7)
    changed = grouped.page_table.copy()
    changed[0, 1, 2] = (changed[0, 1, 2] + 1) % 50
    buffers.load(replace(grouped, page_table=changed), 0, [])
    assert buffers.page_tables[2, 4, 1] == changed[0, 1, 2]
    assert (buffers.page_tables != -7).sum() == 1
    with pytest.raises(ValueError, match="a page table of 1 groups of layers; the pass has 3"):
        buffers.load(batch, 0, [])


def test_padding_rows_have_no_slot_and_one_token_each() -> None:
    buffers = make_buffers()
    buffers.load(make_batch([(slot, 20, 1) for slot in range(6)], seed=1), 0, [])
    batch = make_batch([(4, 9, 1), (2, 3, 1)], seed=2)
    buffers.load(batch, 5, [])
    expect_arrived(buffers, batch)
    for rows in (buffers.rows.cut(5), buffers.logit_rows.cut(5)):
        assert rows.query_starts.tolist() == [0, 1, 2, 3, 4, 5]
        assert rows.slots[2:].tolist() == [-1, -1, -1]
        assert rows.context_lens[2:].tolist() == [0, 0, 0]
    assert buffers.logit_tokens[:5].tolist() == [0, 1, 2, 3, 4]


def test_a_mixed_step_has_its_padding_tokens_and_unused_tiles_in_a_row_without_a_slot() -> None:
    buffers = make_buffers(replace(LIMITS, mixed_tokens=24, mixed_tiles=5))
    buffers.load(make_batch([(slot, 20, 6) for slot in range(6)], seed=1), 0, [])
    batch = make_batch([(4, 9, 1), (2, 3, 1), (5, 0, 7)], seed=2, wanting=[0, 2])
    tiles = np.array([[2, 0, -1, 0], [2, 4, -1, 0]], np.int32)
    (part,) = buffers.load(batch, 0, [np.arange(3, dtype=np.int32)], MixedPadding(16, 5, 2, tiles))
    expect_arrived(buffers, batch)
    assert part.tolist() == [0, 1, 2]
    assert buffers.rows.slots.tolist() == [4, 2, 5, -1, -1, -1, -1]
    assert buffers.rows.query_starts[:4].tolist() == [0, 1, 2, 9]
    assert min(buffers.rows.query_starts[4:].tolist()) > 24, "rows behind the padding row have no token"
    assert buffers.input_ids[9:16].tolist() == [0] * 7
    assert buffers.decode_rows.slots.tolist() == [4, 2, -1, -1, -1, -1]
    found = buffers.tiles.view(-1, 4)
    assert found[:2].tolist() == tiles.tolist()
    assert buffers.rows.slots[found[2:, 0]].tolist() == [-1, -1, -1]


def test_adapters_drafts_and_positions_arrive_beside_their_tokens() -> None:
    limits = replace(LIMITS, has_adapters=True, has_axes=True, max_verified=9)
    buffers = make_buffers(limits)
    batch = make_batch([(4, 9, 1), (2, 3, 4), (5, 0, 3)], seed=2)
    extras = {"adapters": np.array([2, -1, 0], np.int32), "drafts": np.array([0, 3, 1], np.int32)}
    buffers.load(replace(batch, **extras), 0, [])
    expect_arrived(buffers, batch)
    assert buffers.adapters[:9].tolist() == [2, *[-1] * 4, *[0] * 3, -1]
    assert buffers.logit_tokens[:8].tolist() == [0, 4, 7, 1, 2, 3, 6, 7]
    assert buffers.logit_rows.slots[:8].tolist() == [4, 2, 5, 2, 2, 2, 5, -1]
    assert buffers.logit_rows.context_lens[:7].tolist() == [9, 6, 2, 3, 4, 5, 1]
    assert buffers.logit_adapters[:8].tolist() == [2, -1, 0, -1, -1, -1, 0, -1]
    sent = buffers.step(batch, 1, None).rope_positions
    assert sent is not None
    positions = sent.view(8, 3)
    assert positions.tolist() == [[place] * 3 for place in (9, 3, 4, 5, 6, 0, 1, 2)]
    given = np.arange(24, dtype=np.int32).reshape(8, 3)
    buffers.load(replace(batch, rope_positions=given), 0, [])
    assert positions.tolist() == given.tolist()
    assert set(buffers.logit_adapters.tolist()) == {-1}
    for drafts in ([1, 0, 0], [0, 4, 0], [0, -1, 0]):
        with pytest.raises(ValueError, match=r"a draft is .*it must be a token"):
            buffers.load(replace(batch, drafts=np.array(drafts, np.int32)), 0, [])
    with pytest.raises(ValueError, match="rows of the step have adapters; the pass has none"):
        make_buffers().load(replace(batch, adapters=extras["adapters"]), 0, [])


def test_a_known_page_is_not_sent_again() -> None:
    buffers = make_buffers()
    batch = make_batch([(3, 6, 1), (1, 2, 1)])
    buffers.load(batch, 0, [])
    buffers.page_tables.fill_(-7)
    grown = replace(batch, context_lens=batch.context_lens + 2, page_table=batch.page_table % LIMITS.num_pages)
    buffers.load(grown, 0, [])
    assert buffers.page_tables[0, 3, :3].tolist() == [-7, -7, grown.page_table[0, 2]]
    assert buffers.page_tables[0, 1, :2].tolist() == [-7, grown.page_table[1, 1]]


def test_parts_are_sent_along_and_pages_beyond_one_copy_go_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_buffers, "_CHANGES_AT_ONCE", 10)
    buffers = make_buffers()
    batch = make_batch([(slot, 28, 3) for slot in range(6)], seed=3)
    first, second = buffers.load(batch, 0, [np.arange(8, dtype=np.int32), np.arange(5, dtype=np.int32)])
    assert first.tolist() == list(range(8))
    assert second.tolist() == list(range(5))
    expect_arrived(buffers, batch)
    with pytest.raises(ValueError, match=r"cannot send \d+ ints; the block holds"):
        buffers.load(batch, 0, [np.zeros(200, np.int32)])
    other = make_batch([(slot, 9, 1) for slot in range(6)], seed=4)
    with pytest.raises(ValueError, match=r"cannot send \d+ ints; the block holds"):
        buffers.load(other, 0, [np.zeros(200, np.int32)])
    buffers.load(other, 0, [])
    expect_arrived(buffers, other)


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_more_page_changes_than_threads_per_block_arrive(order: Order) -> None:
    buffers = make_buffers(replace(LIMITS, max_pages=40), EmulatedLauncher("check", order))
    batch = make_batch([(slot, 150, 1) for slot in range(6)], max_pages=40)
    buffers.load(batch, 0, [])
    expect_arrived(buffers, batch)


def test_a_block_is_written_only_after_the_device_has_read_it() -> None:
    device = EmulatedDevice()
    device.launcher.prepare(step_buffers.kernels())
    buffers = StepBuffers(device, LIMITS, open_step_library())
    for _ in range(2):
        buffers.load(make_batch([(0, 4, 1)]), 0, [])
    device.fault = RuntimeError("the device never gets there")
    with pytest.raises(RuntimeError, match="never gets there"):
        buffers.load(make_batch([(0, 4, 1)]), 0, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": np.array([0, 6], np.int32)}, "slots are 0 … 6; there are 6"),
        ({"slots": np.array([-1, 2], np.int32)}, "slots are -1 … 2"),
        ({"input_ids": np.array([4, 100], np.int32)}, "token ids are 4 … 100; the vocabulary has 100"),
        ({"input_ids": np.array([-3, 1], np.int32)}, "token ids are -3"),
        ({"input_ids": np.array([-2, 1], np.int32)}, r"embeddings for 0 tokens, from \[\] on; 1 tokens are"),
        ({"context_lens": np.array([0, 32], np.int32)}, "a row ends at 33 tokens; its pages hold 32"),
        ({"query_starts": np.array([0, 2], np.int32)}, "query_starts are"),
        ({"query_starts": np.array([0, 0, 2], np.int32)}, "query_starts are"),
        ({"query_starts": np.array([1, 1, 2], np.int32)}, "query_starts are"),
        ({"query_starts": np.array([0, 1, 3], np.int32)}, "query_starts are"),
        ({"logit_rows": np.array([0, 2], np.int32)}, "logit rows are 0 … 2; there are 2"),
        ({"context_lens": np.array([-1, 3], np.int32)}, "a row ends at"),
        ({"page_table": np.full((2, 8), 50, np.int32)}, "pages are 50 … 50; there are 50"),
    ],
)
def test_an_invalid_batch_is_refused(changes: dict[str, np.ndarray], message: str) -> None:
    buffers = make_buffers()
    with pytest.raises(ValueError, match=message):
        buffers.load(replace(make_batch([(0, 3, 1), (1, 5, 1)]), **changes), 0, [])
    good = make_batch([(0, 3, 1), (1, 5, 1)], seed=9)
    good.input_ids[0] = FROM_SLOT
    buffers.load(good, 0, [])
    expect_arrived(buffers, good)


def test_missing_compiler_is_named_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise LibraryUnavailableError("no C++ compiler: install g++ or clang++, or set CXX to another")

    monkeypatch.setattr(step_library, "open_build", refuse)
    with pytest.raises(StartupError, match=r"the GPU pass cannot pack its steps: no C\+\+ compiler"):
        open_step_library()


def test_too_many_tokens_are_refused() -> None:
    batch = make_batch([(0, 0, 30)])
    batch = replace(batch, input_ids=np.zeros(41, np.int32), query_starts=np.array([0, 41], np.int32))
    with pytest.raises(ValueError, match="the step has 41 tokens in 1 rows; at most 40 in 6"):
        make_buffers().load(batch, 0, [])


def test_device_memory_has_the_announced_size() -> None:
    limits = replace(LIMITS, mixed_tokens=24, mixed_tiles=5, num_groups=2)
    buffers = make_buffers(limits)
    tensors: list[torch.Tensor] = [buffers.uplink.block, buffers.page_tables]
    taken = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert taken == StepBuffers.num_bytes(limits)
