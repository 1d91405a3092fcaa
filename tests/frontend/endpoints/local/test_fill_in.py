"""Code between a prefix and a suffix: each family's tokens and order, with any text around the gap."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from penstock.process.native_libraries import GuardedTokenizer
from tests.frontend.harness import (
    ClientConnection,
    FakeBackend,
    byte_level_tokenizer,
    make_app,
    model_card,
    model_keeper,
    served_model,
)

FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "qwen": (
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    ),
    "starcoder2": (
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<repo_name>", "<file_sep>"),
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    ),
    "granite": (
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<reponame>", "<filename>"),
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    ),
    "deepseek": (
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    ),
    "codellama": (("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>"),
    "codestral": (("[PREFIX]", "[MIDDLE]", "[SUFFIX]"), "[SUFFIX]{suffix}[PREFIX]{prefix}"),
}
"""Added tokens, and the prompt; the order is that of the families' own examples."""


def tokenizer_of(texts: tuple[str, ...]) -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    return tokenizer


def connected(tokenizer: Tokenizer) -> tuple[ClientConnection, FakeBackend]:
    backend = FakeBackend(model=model_card(vocab_size=tokenizer.get_vocab_size()))
    assert backend.model is not None
    keeper = model_keeper(backend, served_model(backend.model, backend, tokenizer=tokenizer))
    return ClientConnection(make_app(backend, keeper=keeper)), backend


@pytest.mark.parametrize("family", FAMILIES)
async def test_prompt_has_the_familys_tokens_in_its_order(family: str) -> None:
    texts, form = FAMILIES[family]
    tokenizer = tokenizer_of(texts)
    connection, backend = connected(tokenizer)
    around = {"prefix": "def f():\n", "suffix": "\n    return x"}
    expected = tokenizer.encode(form.format(**around)).ids
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": around["prefix"], "suffix": around["suffix"]}),
        ("/infill", {"input_prefix": around["prefix"], "input_suffix": around["suffix"]}),
        ("/api/generate", {"model": "test/model", "prompt": around["prefix"], "suffix": around["suffix"]}),
    ]
    for path, body in bodies:
        assert (await connection.post(path, body)).status == 200
        assert list(backend.last.token_ids) == expected
        # Any of these tokens would begin something else.
        assert set(backend.last.stop_token_ids) >= {
            tokenizer.token_to_id(text) for text in texts if "MIDDLE" not in text
        }
    await connection.end()


async def test_code_that_spells_tokens_stays_code() -> None:
    texts, form = FAMILIES["qwen"]
    tokenizer = tokenizer_of(texts)
    connection, backend = connected(tokenizer)
    code = f"x = '{form}' + '<|fim_pad|><|im_end|>'"
    await connection.post("/v1/completions", {"prompt": code, "suffix": code})
    ids = list(backend.last.token_ids)
    marks = [tokenizer.token_to_id(text) for text in (*texts, "<|im_end|>")]
    assert [token_id for token_id in ids if token_id in marks] == marks[:3]
    assert tokenizer.decode(ids, skip_special_tokens=False) == form.format(prefix=code, suffix=code)
    await connection.end()


async def test_further_files_precede_the_prefix_and_the_beginning_follows_the_middle() -> None:
    texts, form = FAMILIES["qwen"]
    tokenizer = tokenizer_of(texts)
    connection, backend = connected(tokenizer)
    body = {"input_prefix": "a", "input_suffix": "b", "prompt": "c", "input_extra": [{"filename": "f.py", "text": "d"}]}
    await connection.post("/infill", body)
    expected = "<|repo_name|>myproject\n<|file_sep|>f.py\nd\n<|file_sep|>filename\n" + form.format(
        prefix="a", suffix="b"
    )
    assert tokenizer.decode(list(backend.last.token_ids), skip_special_tokens=False) == f"{expected}c"
    await connection.end()
    tokenizer = tokenizer_of(FAMILIES["deepseek"][0])
    connection, backend = connected(tokenizer)
    await connection.post("/infill", body)
    expected = "d" + FAMILIES["deepseek"][1].format(prefix="a", suffix="b") + "c"
    assert tokenizer.decode(list(backend.last.token_ids), skip_special_tokens=False) == expected
    await connection.end()


async def test_sentencepiece_adds_its_space_to_the_prefix_alone() -> None:
    """As Meta's and Mistral's own encoders do. The text begins with the tokenizer's own first token."""
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "▁", "☺", "a", "b", "▁a", "▁b"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.add_special_tokens(["<s>", *(AddedToken(t, normalized=False) for t in FAMILIES["codellama"][0])])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    connection, backend = connected(tokenizer)
    await connection.post("/v1/completions", {"prompt": "a", "suffix": "b"})
    names = [tokenizer.id_to_token(token_id) for token_id in backend.last.token_ids]
    assert names == ["<s>", "▁<PRE>", "▁a", "▁<SUF>", "b", "▁<MID>"]
    await connection.end()


async def test_ids_of_a_gguf_file_name_the_tokens() -> None:
    tokenizer = byte_level_tokenizer()
    backend = FakeBackend()
    assert backend.model is not None
    from penstock.frontend.generation.models.served_model import ServedModel, model_syntax_of
    from penstock.frontend.text.tokenizer import ModelTokenizer

    config = {"fim_token_ids": {"prefix": 10, "suffix": 11, "middle": 12, "file": 10**6}}
    loaded = ModelTokenizer(GuardedTokenizer(tokenizer), None, config)
    client: Any = backend
    served = ServedModel(backend.model, loaded, client, model_syntax_of(loaded))
    connection = ClientConnection(make_app(backend, keeper=model_keeper(backend, served)))
    await connection.post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert [id_ for id_ in backend.last.token_ids if id_ in (10, 11, 12)] == [10, 11, 12]
    assert served.syntax.fill_in is not None
    assert served.syntax.fill_in.file is None  # outside the vocabulary
    await connection.end()


@pytest.mark.parametrize(
    ("change", "param"), [({"echo": True}, "echo"), ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens")]
)
async def test_suffix_cannot_be_combined_with_what_cuts_the_prompt(
    connection: ClientConnection, change: dict[str, Any], param: str
) -> None:
    refused = await connection.post("/v1/completions", {"prompt": "a", "suffix": "b", **change})
    assert (refused.status, refused.error["param"]) == (400, param)
    refused = await connection.post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert (refused.status, refused.error["code"], refused.error["param"]) == (400, "unsupported_parameter", "suffix")


@pytest.mark.parametrize("field", ["input_prefix", "input_suffix", "prompt", "input_extra"])
async def test_each_text_is_refused_by_its_length_alone(field: str) -> None:
    connection, _ = connected(tokenizer_of(FAMILIES["qwen"][0]))
    text = "x" * 100_000
    refused = await connection.post("/infill", {field: [{"text": text}] if field == "input_extra" else text})
    assert refused.json()["error"]["type"] == "exceed_context_size_error"
    assert refused.json()["error"]["message"].startswith(f"{field}: at least ")
    await connection.end()
