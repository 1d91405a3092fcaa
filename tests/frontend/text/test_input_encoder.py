"""Inputs are cut exactly as tokenizers itself cuts them, and the second text of a pair is found."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock.frontend.text.input_encoder import InputEncoder, Truncation
from penstock.process.native_libraries import GuardedTokenizer

WORDS = ["[CLS]", "[SEP]", "[UNK]", *(f"w{number}" for number in range(9))]
TEMPLATES = {
    "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "roberta": ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"),
    "none": ("$A", "$A $B:1"),
}


def tokenizer(template: str) -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    single, pair = TEMPLATES[template]
    special = [("[CLS]", 0), ("[SEP]", 1)]
    made.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    return made


ORACLES = {template: tokenizer(template) for template in TEMPLATES}
ENCODERS = {template: InputEncoder(GuardedTokenizer(tokenizer(template))) for template in TEMPLATES}
TEXTS = st.lists(st.sampled_from(WORDS[3:]), max_size=12).map(" ".join)


@settings(max_examples=300)
@given(TEXTS | st.tuples(TEXTS, TEXTS), st.integers(5, 20), st.sampled_from(["left", "right"]), st.booleans())
@pytest.mark.parametrize("template", TEMPLATES)
def test_an_input_is_cut_as_tokenizers_cuts_it(
    template: str, item: str | tuple[str, str], max_tokens: int, side: str, adds: bool
) -> None:
    oracle = ORACLES[template]
    oracle.no_truncation()
    texts = (item,) if isinstance(item, str) else item
    whole = oracle.encode(*texts, add_special_tokens=adds)
    oracle.enable_truncation(max_tokens, direction=side, strategy="longest_first")
    expected = oracle.encode(*texts, add_special_tokens=adds)
    truncation = Truncation(max_tokens, side)  # type: ignore[arg-type]
    (encoded,) = ENCODERS[template].encode([item], truncation, add_special_tokens=adds)
    assert encoded.token_ids == expected.ids
    assert encoded.num_whole_tokens == len(whole.ids)
    second = [position for position, sequence in enumerate(expected.sequence_ids) if sequence == 1]
    if not isinstance(item, str) and second:
        assert encoded.second_start == second[0]


def test_a_second_text_has_a_limit_of_its_own() -> None:
    (encoded,) = ENCODERS["bert"].encode([("w0 w1", "w2 w3 w4")], Truncation(max_second_tokens=1))
    assert [WORDS[each] for each in encoded.token_ids] == ["[CLS]", "w0", "w1", "[SEP]", "w2", "[SEP]"]
    assert encoded.num_whole_tokens == 8
