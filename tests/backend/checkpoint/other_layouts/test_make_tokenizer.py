"""tokenizer.json made of other files: the token ids are those of sentencepiece and tiktoken."""

from __future__ import annotations

import base64
import io
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from penstock.backend.checkpoint.other_layouts import make_tokenizer
from penstock.backend.checkpoint.other_layouts.make_tokenizer import make_files
from penstock.frontend.text.token_bytes import _BYTES as BYTE_OF_CHARACTER
from tests.backend.checkpoint.gguf.test_gguf_tokenizer import SPLIT_TEXTS

_ALPHABET = "ab eE ths\n\t  .,1ð9éß中文字あ👍م'-_/{}=\u0301\u200d"
_RANDOM = random.Random(4)
TEXTS = (
    *SPLIT_TEXTS,
    *("", " leading", "trailing  ", "a  b   c    d", "\n\n", " \n ", "\t", "a\r\n\r\nb", "\x00nul", "\x1b[0m\x7f\x85"),
    *("def f(x):\n    return x + 1\n", "if (a && b) { c[0]; }", "<html>x</html>", "http://a.b/c?d=e#f", "C:\\x"),
    *("Привет", "你好，世界", "العربية", "ไทย", "हिन्दी", "ქართული", "\u0e01\u0e33", "👨‍👩‍👧 🇫🇷", "𝕏 𐍈", "ﷺ"),
    *("▁", "a▁b", "<0x41>", "\ufeffbom", "\u200b", "\ufffd", "\u2028", "a" * 16, "the the the", "WE'LL don’t"),
    *("㎏ ｆｕｌｌ", "中文English混合", "!\n\n", "a/b//\n", "$x^2$"),
    *("".join(_RANDOM.choice(_ALPHABET) for _ in range(_RANDOM.randint(1, 40))) for _ in range(150)),
)
_WORDS = "the order of the house is in the other hour, and an ant ran to a tree: 1234 5678. été 中文 Ещё раз <0x41> "


def make(directory: Path, **files: bytes | dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and tokenizer_config.json; the first of the files is the source, with dots for underscores."""
    paths = [directory / name.replace("__", ".") for name in files]
    for path, content in zip(paths, files.values(), strict=True):
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    made = make_files(paths[0])
    return Tokenizer.from_str(made["tokenizer.json"]), json.loads(made["tokenizer_config.json"])


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


def sentencepiece_model(**options: Any) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_WORDS.split(", ") * 9 + [_WORDS]), model_writer=written, hard_vocab_limit=False,
        minloglevel=2, num_threads=1, **options,
    )  # fmt: skip
    return written.getvalue()


PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
LLAMA = PLAIN | {"model_type": "bpe", "byte_fallback": True, "vocab_size": 360}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": LLAMA | {"user_defined_symbols": ["<think>", "[REF]", "[REF] 1"]},
    "Gemma": LLAMA | {"add_dummy_prefix": False, "user_defined_symbols": ["▁▁", "\t\t"]},
    "without bytes": {"model_type": "bpe", "vocab_size": 90},
    "Unigram": {"model_type": "unigram", "vocab_size": 80},
    "Unigram of bytes": PLAIN | {"model_type": "unigram", "byte_fallback": True, "vocab_size": 340},
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_sentencepiece(name: str, tmp_path: Path) -> None:
    model = sentencepiece_model(**MODELS[name])
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer, config = make(tmp_path, tokenizer__model=model)
    symbols = MODELS[name].get("user_defined_symbols", ())
    # A symbol with a space is never found, as the library looks for it after spaces are replaced.
    for text in (*TEXTS, *(f"the{symbol}the {symbol}{symbol} 1  \t\t" for symbol in symbols)):
        assert ids(tokenizer, text) == oracle.encode(text), text
    assert tokenizer.get_vocab_size() == oracle.vocab_size()
    assert tokenizer.encode("the</s>the").ids[0] == tokenizer.token_to_id("<s>")
    assert tokenizer.token_to_id("</s>") in ids(tokenizer, "the</s>the")
    assert config == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    text = "the order of 12"
    assert tokenizer.decode(ids(tokenizer, text)) == text


def test_settings_of_the_tokenizer_are_followed(tmp_path: Path) -> None:
    """An added token after the vocabulary, a renamed one, bos and eos, and no space after special tokens."""
    model = sentencepiece_model(**LLAMA, user_defined_symbols=["<reserved>"])
    size = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()
    added = {"3": {"content": "<|user|>"}, f"{size + 2}": {"content": "<tool>", "special": False}}
    config = {"legacy": False, "add_bos_token": False, "add_eos_token": True, "added_tokens_decoder": added}
    tokenizer, made = make(
        tmp_path,
        tokenizer__model=model,
        tokenizer_config__json=config,
        added_tokens__json={"<|end|>": size},
        special_tokens_map__json={"eos_token": {"content": "<|end|>"}, "pad_token": "<unk>"},
    )
    tokens = tokenizer.encode("the<|user|>the<tool>").tokens
    assert (tokens[0][0], tokens[-2:]) == ("▁", ["<tool>", "<|end|>"])
    assert "▁" not in "".join(tokens[1:])
    assert ids(tokenizer, "<|user|><|end|><tool>") == [3, size, size + 2]
    special = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert (special["<|user|>"], special["<|end|>"], special["<tool>"]) == (True, True, False)
    assert tokenizer.decode(ids(tokenizer, "the<tool>")) == "the<tool>"
    assert made["bos_token"] == "<s>"
    assert made["eos_token"] == {"content": "<|end|>"}


def ranks() -> dict[bytes, int]:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([_WORDS] * 3, trainer)
    by_id = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    return {bytes(BYTE_OF_CHARACTER[character] for character in token): index for token, index in by_id}


def tiktoken_file() -> bytes:
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks().items())


_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


@pytest.mark.parametrize(
    ("kind", "file", "pattern"),
    [("QWenTokenizer", "qwen__tiktoken", _QWEN), ("TikTokenTokenizer", "tiktoken__model", _KIMI)],
)
def test_tokens_are_those_of_tiktoken(kind: str, file: str, pattern: str, tmp_path: Path) -> None:
    num_ranks = len(ranks())
    specials = {"<|endoftext|>": num_ranks, "<|im_end|>": num_ranks + 2}
    config: dict[str, Any] = {"tokenizer_class": kind}
    if kind == "TikTokenTokenizer":
        config["added_tokens_decoder"] = {str(index): {"content": token} for token, index in specials.items()}
    oracle = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks(), special_tokens=specials)
    tokenizer, made = make(tmp_path, **{file: tiktoken_file(), "tokenizer_config__json": config})
    for text in (*TEXTS, "the<|im_end|>\nthe order<|endoftext|>"):
        normal = unicodedata.normalize("NFC", text) if pattern is _QWEN else text
        assert tokenizer.encode(text).ids == oracle.encode(normal, allowed_special="all"), text
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == normal
    assert made == config


def test_tokens_of_llama_3_are_those_of_tiktoken(tmp_path: Path) -> None:
    num_ranks = len(ranks())
    specials = {"<|begin_of_text|>": num_ranks, "<|end_of_text|>": num_ranks + 1, "<|eot_id|>": num_ranks + 9}
    specials |= {"<|python_tag|>": num_ranks + 10, "<|reserved_special_token_247|>": num_ranks + 255}
    oracle = tiktoken.Encoding("x", pat_str=_LLAMA3, mergeable_ranks=ranks(), special_tokens=specials)
    tokenizer, made = make(tmp_path, tokenizer__model=tiktoken_file())
    for text in (*TEXTS, "".join(specials)):
        assert tokenizer.encode(text).ids == [num_ranks, *oracle.encode(text, allowed_special="all")], text
    assert (made["bos_token"], made["eos_token"]) == ("<|begin_of_text|>", "<|end_of_text|>")
    assert tokenizer.get_vocab_size() == num_ranks + 256


def word_pieces(*tokens: str) -> bytes:
    return "\n".join((*tokens, "the", "un", "##able", "a", "##a")).encode()


_SPECIAL = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_DEBERTA = dict(zip(("pad_piece", "bos_piece", "eos_piece", "unk_piece"), ("[PAD]", *_BERT[2:4], "[UNK]"), strict=True))


@pytest.mark.parametrize(
    ("model_type", "file", "offset", "options", "pair"),
    [
        ("xlm-roberta", "sentencepiece__bpe__model", 1, {}, "<s>A</s></s>B</s>"),
        ("camembert", "sentencepiece__bpe__model", 4, {}, "<s>A</s></s>B</s>"),
        ("deberta-v2", "spm__model", 0, _SPECIAL | _DEBERTA, "[CLS]A[SEP]B[SEP]"),
    ],
)
def test_tokens_of_encoders_are_those_of_sentencepiece(
    model_type: str, file: str, offset: int, options: dict[str, Any], pair: str, tmp_path: Path
) -> None:
    model = sentencepiece_model(**MODELS["Unigram"], **options)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer, _ = make(tmp_path, **{file: model, "config__json": {"model_type": model_type}})
    for text in TEXTS:
        expected = [token + offset if token or not offset else 3 for token in oracle.encode(text)]
        assert ids(tokenizer, text) == expected, text
    one, two = ("".join(tokenizer.encode(text, add_special_tokens=False).tokens) for text in ("the order", "house"))
    both = "".join(tokenizer.encode("the order", "house").tokens)
    assert both == pair.replace("A", one).replace("B", two)
    assert tokenizer.token_to_id("[MASK]" if "[" in pair else "<mask>") == oracle.vocab_size() + offset


def test_tokens_of_a_tokenizer_class_are_those_of_its_files(tmp_path: Path) -> None:
    tokenizer, made = make(
        tmp_path,
        vocab__txt=word_pieces(*_BERT),
        config__json={"model_type": "bert"},
        tokenizer_config__json={"do_lower_case": False},
    )
    assert tokenizer.encode("the unable Aa", "[MASK]a").tokens == [
        *("[CLS]", "the", "un", "##able", "[UNK]", "[SEP]", "[MASK]", "a", "[SEP]")
    ]
    assert (made["cls_token"], made["do_lower_case"]) == ("[CLS]", False)


def tekken(**change: Any) -> dict[str, Any]:
    """Mistral's format: the ids of special tokens come first, and of the ranks only some are used."""
    specials = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
    return {
        "config": {"pattern": _QWEN, "default_vocab_size": 300, "default_num_special_tokens": 10, "version": "v11"},
        "vocab": [{"token_bytes": base64.b64encode(token).decode()} for token in ranks()],
        "special_tokens": [{"rank": rank, "token_str": text} for rank, text in enumerate(specials)],
    } | change


def test_tokens_of_tekken_are_those_of_tiktoken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = {token: rank for token, rank in ranks().items() if rank < 290}
    oracle = tiktoken.Encoding("x", pat_str=_QWEN, mergeable_ranks=used, special_tokens={})
    tokenizer, config = make(tmp_path, tekken__json=tekken())
    for text in TEXTS:
        assert ids(tokenizer, text) == [10 + rank for rank in oracle.encode_ordinary(text)], text
    assert tokenizer.encode("[INST]the</s>").ids == [1, 3, *ids(tokenizer, "the"), 2]
    assert tokenizer.token_to_id("<SPECIAL_7>") == 7
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert "has no chat template: pip install mistral-common" in capsys.readouterr().out
    make(tmp_path, tekken__json=tekken(), tokenizer_config__json={"chat_template": "{{ messages }}"})
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "config", "expected"),
    [
        ("tokenizer.model", b"no model", {}, "it cannot be used (DecodeError: "),
        ("tokenizer.model", b"", {}, "it is no SentencePiece model of the kinds BPE and Unigram"),
        ("tiktoken.model", b"!", {"tokenizer_class": "QWenTokenizer"}, "it cannot be used ("),
        ("tiktoken.model", b"YQ== 0\nYg== 2\n", {"tokenizer_class": "QWenTokenizer"}, "its 2 ranks are not 0 to 1"),
        (
            "x.tiktoken",
            b"YQ== 0\n",
            {"tokenizer_class": "MyTokenizer"},
            "tokenizer_class is 'MyTokenizer', and the way",
        ),
        ("x.tiktoken", b"", {"added_tokens_decoder": {"-1": {"content": "a"}}}, "has the token id -1; ids are 0 to"),
        ("x.tiktoken", b"", {"added_tokens_decoder": {"1": "a"}}, "added_tokens_decoder has 'a' for '1'"),
        (
            *("tokenizer.model", b"".join(b"YQ== %d\n" % rank for rank in range(3)), {}),
            "its 1 ranks are not 0 to 0",
        ),
        ("vocab.txt", word_pieces(*_BERT), {"tokenizer_class": "GPT2Tokenizer"}, "; known are BertTokenizer, Dis"),
        ("tekken.json", b"{}", {}, "it cannot be used (KeyError: 'config')"),
        ("tekken.json", json.dumps(tekken(special_tokens=None)).encode(), {}, "it needs mistral-common"),
    ],
)
def test_file_that_cannot_be_converted_is_refused_in_a_line(
    name: str, content: bytes, config: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_tokenizer.resource, "setrlimit", lambda *_: None)  # it would hold for the tests' process
    (tmp_path / name).write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    line = make_tokenizer.main(tmp_path / name, tmp_path)
    assert line is not None
    assert expected in line
    assert "\n" not in line
    assert not (tmp_path / "tokenizer.json").exists()


def test_missing_library_is_named_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Path) -> None:
        raise ModuleNotFoundError("No module named 'sentencepiece'", name="sentencepiece")

    monkeypatch.setattr(make_tokenizer.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(make_tokenizer, "make_files", missing)
    assert make_tokenizer.main(tmp_path, tmp_path) == "it needs sentencepiece: pip install 'penstock[tokenizers]'"
