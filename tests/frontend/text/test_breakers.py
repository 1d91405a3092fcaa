"""The tokens of DRY's sequence breakers, as llama.cpp finds them."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.frontend.generation.submission.sampling import read_breakers
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.text.token_bytes import BreakerSearch
from penstock.frontend.transport.errors import ApiError
from tests.frontend.harness import model_card, served_model

TOKENS = [b"a", b"ab", b"b", b"xab", b"bab", b"\xff", b"", b"abc", b"xa", "\u732b".encode()]
MOST = 1000
IDS = {token: token_id for token_id, token in enumerate(TOKENS)}


def runs_of(packed: bytes) -> set[tuple[int, ...]]:
    flat = np.frombuffer(packed, np.int32)
    return {tuple(run[:-1].tolist()) for run in np.split(flat, np.flatnonzero(flat == -1) + 1) if len(run)}


def test_breaker_is_a_token_that_contains_the_text_or_begins_it_with_the_rest_behind() -> None:
    search = BreakerSearch(TOKENS, lambda texts: [[IDS[letter.encode()] for letter in text] for text in texts])
    assert runs_of(search.find(["\u732b"], MOST)) == {(9,)}
    assert runs_of(search.find(["ab"], MOST)) == {(1,), (3,), (4,), (7,), (0, 2), (8, 2)}
    assert runs_of(search.find(["ba", "b"], MOST)) == {(4,), (1,), (2,), (3,), (7,), (1, 0), (2, 0), (3, 0)}
    assert search.find([], MOST) == b""
    assert runs_of(search.find(["b", "ab"], 20)) == {(1,), (2,), (3,)}


async def test_breakers_are_searched_only_for_dry_and_kept() -> None:
    served = served_model(model_card())
    plain = CompletionBody(prompt="x", dry_sequence_breakers=["a"])
    assert await read_breakers(plain, served) == b""
    found = await read_breakers(CompletionBody(prompt="x", dry_multiplier=0.8), served)
    names = {served.tokenizer.token_bytes(token) for (token,) in runs_of(found)}
    assert names
    assert all(set(name) & set(b'\n:"*') for name in names)
    assert await read_breakers(CompletionBody(prompt="x", dry_multiplier=0.8), served) is found


async def test_breakers_above_the_limit_are_refused_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.text.tokenizer.MAX_BREAKER_BYTES", 40)
    served = served_model(model_card())
    found = await served.tokenizer.breaker_tokens(("a",))
    assert len(found) == 48
    assert await served.tokenizer.breaker_tokens(("a",)) is not found
    monkeypatch.setattr("penstock.frontend.generation.submission.sampling.MAX_BREAKER_BYTES", 40)
    body = CompletionBody(prompt="x", dry_multiplier=0.8, dry_sequence_breakers=["a"])
    with pytest.raises(ApiError, match="more than the limit of 10 ids of tokens"):
        await read_breakers(body, served)
