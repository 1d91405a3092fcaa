"""Streamed text, compared with the tokenizer's decoding of all tokens at once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from penstock.frontend.text.detokenizer import Detokenizer
from penstock.frontend.text.tokenizer import ModelTokenizer
from penstock.process.native_libraries import GuardedTokenizer
from tests.frontend.harness import byte_level_tokenizer

CORPUS = ["the cat sat on the mat, été 猫 🐈", "return self.name  # two  spaces", "ça va? 你好"] * 4


def sentencepiece_like(*, metaspace: bool) -> Tokenizer:
    """Like Llama 2 and Mistral: a space is ▁, one starts the text, and unknown characters are bytes <0x00>…<0xFF>."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=80, show_progress=False))
    tokens += [text for text in learner.get_vocab() if text not in ("🐈", "猫", "é")]
    vocabulary = {text: index for index, text in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return tokenizer


TOKENIZERS = {
    "byte-level": byte_level_tokenizer(),
    "llama": sentencepiece_like(metaspace=False),
    "metaspace": sentencepiece_like(metaspace=True),
}
TEXTS = st.text(st.sampled_from(" abcdehiorst,.?é猫🐈你好\n\t#ß\u0301\u200d"), max_size=40) | st.text(max_size=20)


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = ModelTokenizer(GuardedTokenizer(tokenizer), None).detokenizer()
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [detokenizer.push(ids[start:end]) for start, end in itertools.pairwise(bounds)]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_any_split_of_a_text_streams_to_the_text(name: str, text: str, cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = streamed(tokenizer, ids, cuts)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(data=st.data(), cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_any_tokens_of_a_byte_level_tokenizer_stream_to_what_it_decodes(data: st.DataObject, cuts: list[int]) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=60))
    assert "".join(streamed(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["llama", "metaspace"])
@given(data=st.data(), cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_any_tokens_stream_to_the_same_text_in_any_split(name: str, data: st.DataObject, cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 5), max_size=60))
    assert "".join(streamed(tokenizer, ids, cuts)) == "".join(streamed(tokenizer, ids, []))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_without_text_do_not_swallow_the_space_after_them(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    special = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    ids = tokenizer.encode("the cat", add_special_tokens=False).ids
    ids = [*special, ids[0], *special * 30, *ids[1:], *special]
    assert "".join(streamed(tokenizer, ids, list(range(len(ids))))) == tokenizer.decode(ids) == "the cat"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_window_stays_short_for_bytes_that_never_become_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    byte = tokenizer.token_to_id("<0x80>") or tokenizer.token_to_id("Ģ")  # 0x80 as GPT-2 writes it
    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.push([byte]) for _ in range(500)) + detokenizer.flush()
    assert text == "\ufffd" * 500
    assert longest < 32


@given(st.text(max_size=60), st.data())
def test_streams_of_the_same_tokens_decode_them_once(text: str, data: st.DataObject) -> None:
    guarded = GuardedTokenizer(TOKENIZERS["byte-level"])
    decoded: list[list[int]] = []
    guarded.decode = lambda ids: decoded.append(ids) or TOKENIZERS["byte-level"].decode(ids)
    ids = TOKENIZERS["byte-level"].encode(text, add_special_tokens=False).ids
    tokenizer = ModelTokenizer(guarded, None)
    for number in range(3):
        before = len(decoded)
        cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6))), len(ids)]
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.push(ids[start:end]) for start, end in itertools.pairwise(cuts)]
        assert "".join(pieces) + detokenizer.flush() == TOKENIZERS["byte-level"].decode(ids)
        assert len(decoded) == before or not number


def test_character_in_four_tokens_is_emitted_whole() -> None:
    tokenizer = TOKENIZERS["llama"]
    detokenizer = Detokenizer(tokenizer.decode)
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🐈".encode()]
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", "", "🐈"]
    assert detokenizer.flush() == ""


def test_incomplete_character_at_the_end_is_replaced() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("a🐈", add_special_tokens=False).ids[:-1]
    detokenizer = Detokenizer(tokenizer.decode)
    assert detokenizer.push(ids) == "a"
    assert detokenizer.flush() == tokenizer.decode(ids)[1:] == "\ufffd"
