"""Texts of a tenant that are found in the pages of its other texts."""

from __future__ import annotations

from array import array

import numpy as np

from penstock.backend.kv_cache.earlier_texts import EarlierTexts
from penstock.backend.kv_cache.page_hash import extend_page_hashes
from penstock.backend.kv_cache.page_index import IndexedPage
from penstock.backend.kv_cache.page_pool import PagePool

PAGE = 8


def new_pool(num_pages: int = 64) -> tuple[PagePool, EarlierTexts]:
    texts = EarlierTexts(num_pages, PAGE)
    return PagePool(num_pages, texts=texts), texts


def store(pool: PagePool, tokens: list[int], salt: bytes) -> list[int]:
    """Index the text's full pages. Returns them; they stay held."""
    text, hashes = array("i", tokens), []
    extend_page_hashes(hashes, text, len(text), PAGE, salt)
    pages = pool.allocate(len(hashes))
    for place, (page, page_hash) in enumerate(zip(pages, hashes, strict=True)):
        content = text[place * PAGE : (place + 1) * PAGE].tobytes()
        pool.index_page(page, content, IndexedPage(page_hash, hashes[place - 1] if place else salt, salt))
    return pages


def test_what_followed_in_an_earlier_text_is_found_across_its_pages() -> None:
    pool, texts = new_pool(4096)
    text = np.random.default_rng(3).permutation(200)[:96].tolist()
    store(pool, text, b"a" * 16)
    found = {end: texts.find(b"a" * 16, array("i", [7, *text[end - 3 : end]])) for end in range(3, 96)}
    assert all(tokens in ([], text[end : end + 64]) for end, tokens in found.items())
    assert 50 < sum(map(bool, found.values())) <= 60  # not at a page's beginning, and rarely where hashes collide


def test_only_texts_of_the_same_salt_are_found() -> None:
    """Another tenant's equal text is not found, though its hash may share a place."""
    pool, texts = new_pool()
    theirs = list(range(1, 17))
    store(pool, theirs, b"b" * 16)
    assert texts.find(b"b" * 16, array("i", theirs[:3])) == theirs[3:]
    assert texts.find(b"a" * 16, array("i", theirs[:3])) == []
    texts._places = array("i", [3]) * len(texts._places)  # every hash has the place of theirs[3]
    assert texts.find(b"b" * 16, array("i", theirs[:3])) == theirs[3:]
    assert texts.find(b"a" * 16, array("i", theirs[:3])) == []
    assert texts.find(b"b" * 16, array("i", theirs[1:4])) == []


def test_nothing_is_found_in_pages_that_have_left_the_cache() -> None:
    pool, texts = new_pool(2)
    old, new = list(range(1, 17)), list(range(101, 117))
    pages = store(pool, old, b"")
    assert texts.find(b"", array("i", old[3:6])) == old[6:]
    pool.release(pages)
    store(pool, new, b"")
    assert texts.find(b"", array("i", old[3:6])) == []
    assert texts.find(b"", array("i", new[3:6])) == new[6:]
    pool.invalidate_tenant(b"")
    assert texts.find(b"", array("i", new[3:6])) == []
