"""Tokenizers made of a GGUF file's metadata, against those that transformers makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import CohereTokenizer, GPTNeoXTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from penstock.backend.checkpoint.gguf.tokenizer import GgufTokenizer, check_tokenizer
from penstock.backend.errors import StartupError
from tests.backend.checkpoint.gguf.writer import byte_level_vocabulary

TEXTS = (
    "the order of\n\n the  1234 in an hour",
    " a",
    "Éa\u0301 thé — ☃ 𝄞",
    "",
    "it's  the'll\t\r\nx",
    "<|eot_id|> the",
)


def sentencepiece_vocabulary() -> dict[str, Any]:
    pieces = ["▁", "t", "h", "e", "o", "f", "r", "n", "i", "a", "1", "2"]
    words = ["th", "he", "▁t", "▁the", "▁th", "the", "in", "▁in", "an", "▁o", "▁of", "er", "or", "▁or"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *pieces, "<|eot_id|>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(pieces)), 4]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words) + len(pieces))] + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def make(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(check_tokenizer(GgufTokenizer(metadata).tokenizer_json()))


def reference(metadata: dict[str, Any], architecture: str) -> Any:
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if "ggml" in key}
    return convert_gguf_tokenizer(architecture, {names.get(key, key): value for key, value in values.items()})[0]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-2", "dbrx", "gpt-4o", "falcon3", "llama4"])
def test_byte_level_tokens_are_those_of_transformers(pre: str) -> None:
    metadata = byte_level_vocabulary(320, pre)
    ours, theirs = make(metadata), reference(metadata, "llama")
    if pre == "qwen2":  # which transformers composes only for Qwen's own class
        theirs.normalizer = ours.normalizer
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == theirs.decode(ids)


SPLIT_TEXTS = (
    *TEXTS,
    "In 2026, 1234567 + 3.14 = ٣٤٥ or Ⅻ ½ x10y200",
    "It's WE'LL they'd've don’t",
    "a\u00a0 b\t\tc\r\n\r\n  d \n \u3000e   ",
    "東京は2026年です。한국어 ไทย русский",
    "e\u0301 ﬁ Å (x)!?//\n/y == {}; <|x|> 👍🏽",
)


def starcoder() -> Tokenizer:
    """The pre-tokenizer of bigcode/starcoder2-3b, smallcloudai/Refact-1_6-base and Granite 3."""
    digits, level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    return published(pre_tokenizers.Sequence([digits, level]))


def glm() -> Tokenizer:
    """The pre-tokenizer of GLM-4-9B-0414: GPT-4's expression."""
    expression = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return published(pre_tokenizers.Sequence([pre_tokenizers.Split(expression, "isolated"), level]))


def published(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


PUBLISHED: dict[str, Callable[[], Tokenizer]] = {
    "olmo": lambda: GPTNeoXTokenizer().backend_tokenizer,
    "command-r": lambda: CohereTokenizer().backend_tokenizer,
    "starcoder": starcoder,
    "refact": starcoder,
    "smollm": starcoder,
    "glm4": glm,
}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_text_is_split_as_the_model_s_own_tokenizer_splits_it(pre: str) -> None:
    ours, theirs = make(byte_level_vocabulary(320, pre)), PUBLISHED[pre]()
    for text in SPLIT_TEXTS:
        assert pieces(ours, text) == pieces(theirs, text)


RECORDED: dict[str, tuple[str, ...]] = {
    "It|'|S| |123|45|\n|\n|東京|2| x|\u0301|t|=|y|_!?| z|.": ("default", "falcon"),
    "It|'S| |123|45|\n\n|東京|2| x|\u0301t|=y|_!?| z|.": ("smaug-bpe", "chatglm-bpe", "minicpm5"),
    "It|'S| |1|2|3|4|5|\n\n|東京|2| x|\u0301t|=y|_!?| z|.": ("megrez", "ufakzeka", "seed-coder"),
    "It|'S| |1|2|3|4|5|\n\n|東京|2| x\u0301t|=y|_!?| z|.": ("qwen35",),
    "It|'|S| |1|2|3|4|5|\n|\n|東京|2| x|\u0301|t|=|y|_!?| z|.": ("deepseek-coder", "exaone"),
    "It|'S| |123|45|\n\n|東京|2| x\u0301t|=y|_!?| z|.": ("deepseek-v3",),
    "It'S |12|345|\n\n東京|2| x\u0301t=y_!? z.": ("superbpe",),
    "It'S| 12345|\n\n|東京2| x\u0301t=y_|!?| z|.": ("poro-chat",),
    "It'S| |1|2|3|4|5|\n\n|東京|2| x\u0301t=y_|!?| z|.": ("viking",),
    "It|'|S| 12345|\n|\n|東京|2| x|\u0301|t|=|y|_!?| z|.": ("mellum",),
}
"""Pieces of a text as llama.cpp at 0c1e57098 splits it → names of the way to split."""


@pytest.mark.parametrize("expected", RECORDED)
def test_text_is_split_as_recorded(expected: str) -> None:
    for pre in RECORDED[expected]:
        tokenizer = make(byte_level_vocabulary(320, pre))
        text = expected.replace("|", "")
        normal = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
        offsets = [offset for _, offset in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]
        assert "|".join(normal[first:end] for first, end in offsets) == expected, pre


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    normalizer: normalizers.Normalizer | None = tokenizer.normalizer
    normal = text if normalizer is None else normalizer.normalize_str(text)
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]


def test_sentencepiece_tokens_are_those_of_transformers() -> None:
    """phi3 is the architecture for which transformers writes the normaliser of Llama 2's own tokenizer.json."""
    metadata = sentencepiece_vocabulary()
    ours, theirs = make(metadata), reference(metadata, "phi3")
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        if "<|" not in text:
            assert ours.decode(ids) == text
    assert ours.encode("the").ids[0] == 1


def test_tokens_of_gemma_are_those_of_transformers() -> None:
    """SentencePiece without a space before the text."""
    metadata = sentencepiece_vocabulary() | {"tokenizer.ggml.add_space_prefix": False}
    ours, theirs = make(metadata), reference(metadata, "gemma2")
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        if "<|" not in text:
            assert ours.decode(ids) == text


@pytest.mark.parametrize(("said", "first"), [(True, True), (False, False), (None, True)])
def test_bos_is_added_as_the_file_says(said: bool | None, first: bool) -> None:
    metadata = sentencepiece_vocabulary() | ({} if said is None else {"tokenizer.ggml.add_bos_token": said})
    assert (make(metadata).encode("the").ids[0] == 1) == first


def test_space_prefix_can_be_switched_off() -> None:
    tokenizer = make(sentencepiece_vocabulary() | {"tokenizer.ggml.add_space_prefix": False})
    ids = tokenizer.encode("the", add_special_tokens=False).ids
    assert tokenizer.id_to_token(ids[0]) == "the"
    assert tokenizer.decode(ids) == "the"


def test_the_last_of_equal_tokens_is_used_and_empty_ones_are_none() -> None:
    metadata = byte_level_vocabulary(320)
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[310:313] = ["", "", "a"]
    tokenizer = make(metadata)
    assert tokenizer.encode("xa", add_special_tokens=False).ids == [tokens.index("x"), 312]
    assert tokenizer.get_vocab_size() == 319


def test_named_templates_are_listed_as_in_other_checkpoints() -> None:
    metadata = byte_level_vocabulary(320)
    tool_use = {"tokenizer.chat_template.tool_use": "{{ tools }}", "tokenizer.chat_templates": ["tool_use"]}
    assert GgufTokenizer(metadata).tokenizer_config()["chat_template"] == metadata["tokenizer.chat_template"]
    assert GgufTokenizer(metadata | tool_use).tokenizer_config()["chat_template"] == [
        {"name": "default", "template": metadata["tokenizer.chat_template"]},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]


def test_tokens_for_filling_in_are_passed_on_by_id() -> None:
    """By today's keys before the older ones."""
    keys = {"fim_pre": 5, "fim_suf": 6, "fim_mid": 7, "fim_sep": 8, "prefix": 9}
    metadata = byte_level_vocabulary(320)
    named = {f"tokenizer.ggml.{key}_token_id": token_id for key, token_id in keys.items()}
    expected = {"prefix": 5, "suffix": 6, "middle": 7, "file": 8}
    assert GgufTokenizer(metadata | named).tokenizer_config()["fim_token_ids"] == expected
    assert "fim_token_ids" not in GgufTokenizer(metadata).tokenizer_config()
    with pytest.raises(StartupError, match="fim_mid_token_id is 320; the file has 320 tokens"):
        GgufTokenizer(metadata | named | {"tokenizer.ggml.fim_mid_token_id": 320}).tokenizer_config()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "tokenizer.ggml.tokens is missing: the file has no tokenizer"),
        ({"tokens": []}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "tokens is not a list of str"),
        ({"tokens": "abc"}, "tokens is 'abc'; expected list"),
        ({"token_type": [1]}, "token_type has 1 items for 320 tokens"),
        ({"model": "rwkv"}, "model is 'rwkv'; supported are llama, gemma4, gpt2, bert, t5"),
        ({"pre": "unheard-of"}, "pre is 'unheard-of'; it is none of"),
        ({"pre": None}, "pre is None"),
        ({"merges": ["a b c"]}, "merges has 'a b c', which is no pair of tokens"),
        ({"merges": ["q x"]}, "merges has 'q x', which gives no token"),
        ({"bos_token_id": 320}, "bos_token_id is 320; the file has 320 tokens"),
        ({"bos_token_id": "x"}, "bos_token_id is 'x'; expected int"),
        ({"model": "llama"}, "scores has 0 items for 320 tokens"),
    ],
)
def test_tokenizer_that_does_not_fit_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    values = byte_level_vocabulary(320) | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    values = {key: value for key, value in values.items() if value is not None}
    if change.get("model") == "llama":
        del values["tokenizer.ggml.merges"]
    with pytest.raises(StartupError, match=message):
        GgufTokenizer(values).tokenizer_json()


def test_what_the_library_refuses_is_refused() -> None:
    with pytest.raises(StartupError, match="the file's tokenizer cannot be used"):
        check_tokenizer(json.loads('{"version": "1.0", "model": {"type": "BPE"}}'))
