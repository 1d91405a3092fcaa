"""The table of findable pages against a plain dictionary of prompts, through a real page pool."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backend.kv_cache.page_hash import extend_page_hashes
from penstock.backend.kv_cache.page_index import IndexedPage
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.shm.memory.board import BackendBoard
from penstock.shm.memory.page_digest import PageDigest, PageDigestWriter, digest_bytes, page_names

PAGE = 4
NUM_PAGES = 12
SALTS = [b"", b"\0", b"tenant"]

prompts = st.tuples(st.sampled_from(SALTS), st.lists(st.integers(0, 1), min_size=1, max_size=5 * PAGE))


def hashes_of(tokens: list[int], salt: bytes) -> list[bytes]:
    hashes: list[bytes] = []
    extend_page_hashes(hashes, array("i", tokens), len(tokens), PAGE, salt)
    return hashes


def num_findable(pool: PagePool, tokens: list[int], salt: bytes) -> int:
    """Pages up to the last one that can be found, on the device or on the host."""
    found = [
        place + 1
        for place, page_hash in enumerate(hashes_of(tokens, salt))
        if pool.find(page_hash) is not None or page_hash in pool.host_offload
    ]
    return max(found, default=0)


def add(pool: PagePool, tokens: list[int], salt: bytes) -> None:
    hashes = hashes_of(tokens, salt)
    pages = pool.allocate(len(hashes))
    for place, (page, page_hash) in enumerate(zip(pages, hashes, strict=True)):
        content = array("i", tokens[place * PAGE : (place + 1) * PAGE]).tobytes()
        pool.index_page(page, content, IndexedPage(page_hash, hashes[place - 1] if place else salt, salt))
    pool.mark_for_offload(hashes)
    pool.release(pages)


@settings(max_examples=150)
@given(st.lists(prompts, max_size=20), st.lists(st.sampled_from(SALTS), max_size=2), st.sampled_from([0, 1, 6]))
def test_reader_finds_what_the_pool_finds_of_each_prompt_and_tenant(
    given: list[tuple[bytes, list[int]]], invalidated: list[bytes], num_host_pages: int
) -> None:
    board = BackendBoard.create(digest_bytes(NUM_PAGES + num_host_pages))
    writer = PageDigestWriter(board.behind, PAGE)
    reader = BackendBoard.attach(board.fd)
    pool = PagePool(NUM_PAGES, num_host_pages, names=writer)
    for salt, tokens in given:
        add(pool, tokens, salt)
    for salt in invalidated:
        pool.invalidate_tenant(salt)
    digest = reader.digest
    assert digest is not None
    for salt, tokens in given:
        for other in SALTS:
            longer = [*tokens, 9]
            names = page_names(array("i", longer), other, PAGE)
            found = digest.num_cached_tokens(names)
            # A name that another one overwrites is missing, so the reader may find less, and it never finds more.
            assert found <= PAGE * num_findable(pool, longer, other)
            if other == salt and len(set(map(tuple, (text for _, text in given)))) == 1:
                assert found == PAGE * num_findable(pool, longer, other)
    reader.close()
    writer.close()
    board.close()


def test_page_that_only_the_host_has_keeps_its_name_until_the_host_forgets_it() -> None:
    memory = memoryview(bytearray(digest_bytes(10_000)))  # so large that no name overwrites another
    pool, digest = PagePool(2, 1, names=PageDigestWriter(memory, PAGE)), PageDigest.read(memory)
    assert digest is not None
    prompts = [[number] * 2 * PAGE for number in range(3)]
    names = [page_names(array("i", [*prompt, 9]), b"", PAGE) for prompt in prompts]

    def num_cached() -> list[int]:
        return [digest.num_cached_tokens(each) for each in names]

    add(pool, prompts[0], b"")
    assert num_cached() == [2 * PAGE, 0, 0]
    add(pool, prompts[1], b"")  # the first prompt's beginning was evicted last, so the host has that
    assert num_cached() == [PAGE, 2 * PAGE, 0]
    add(pool, prompts[2], b"")
    assert num_cached() == [0, PAGE, 2 * PAGE]
    pool.invalidate_tenant(b"")
    assert num_cached() == [0, 0, 0]


def test_last_token_and_what_is_beyond_the_bound_have_no_names() -> None:
    tokens = array("i", range(300 * PAGE))
    assert len(page_names(tokens, b"", PAGE)) == 256
    assert len(page_names(tokens[: 2 * PAGE], b"", PAGE)) == 1
    assert len(page_names(tokens[: 2 * PAGE + 1], b"", PAGE)) == 2
    assert page_names(tokens[:PAGE], b"", PAGE) == []


@pytest.mark.parametrize(("num_pages", "num_words"), [(1, 2), (3, 8), (1 << 22, 1 << 18)])
def test_table_has_two_words_for_each_page_up_to_its_bound(num_pages: int, num_words: int) -> None:
    assert digest_bytes(num_pages) == 64 + 8 * num_words
    assert digest_bytes(0) == 0


def test_memory_without_a_table_or_with_a_bad_header_has_no_digest() -> None:
    assert PageDigest.read(memoryview(b"")) is None
    memory = bytearray(digest_bytes(4))
    assert PageDigest.read(memoryview(memory)) is None
    PageDigestWriter(memoryview(memory), PAGE)
    assert PageDigest.read(memoryview(memory)) is not None
    for place, word in ((8, 0), (16, 3), (16, 1 << 40), (16, 16)):
        damaged = bytearray(memory)
        damaged[place : place + 8] = word.to_bytes(8, "little")
        assert PageDigest.read(memoryview(damaged)) is None
