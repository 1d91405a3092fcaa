"""GGUF files of models that return vectors, against the checkpoints that they were made of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import BertTokenizer, XLMRobertaTokenizer

from penstock.backend.checkpoint.encoders.decoder_heads import read_pooled_decoder
from penstock.backend.checkpoint.encoders.tasks import ModelTask, find_task
from penstock.backend.checkpoint.gguf import cached_directories
from penstock.backend.checkpoint.gguf.tokenizer import GgufTokenizer, check_tokenizer
from penstock.backend.checkpoint.hub import resolve_model
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.forward_pass import DecoderPass
from penstock.backend.passes.encoder.forward_pass import EncoderPass
from penstock.frontend.text.pooling_files import QWEN3_RERANKER, PoolingFiles
from tests.backend.checkpoint.gguf.writer import GgufFile, byte_level_vocabulary, from_model, quantize
from tests.backend.passes.decoder import pooled_driver
from tests.backend.passes.encoder.driver import cosine, random_rows, run_rows
from tests.checkpoints import make_model
from tests.encoder_checkpoints import make_encoder

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEXTS = ("The unable, THE!", "é\u0301 Éa of东京 [MASK]  un-x", "zzz", "")
_PIECES = ("the", "of", "un", "##able", "a", "e", "##a", "##e", "x", ",", "!", "-", "京")
TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_PIECES)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_directories, "cache_directory", lambda: tmp_path / "cache")


def word_piece_vocabulary(vocab_size: int = len(TOKENS)) -> dict[str, Any]:
    marked = [
        token if token.startswith("[") else token[2:] if token.startswith("##") else f"\u2581{token}"
        for token in TOKENS
    ]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "bert-bge",
        "tokenizer.ggml.tokens": marked + [f"[unused{i}]" for i in range(vocab_size - len(TOKENS))],
        "tokenizer.ggml.token_type": [3] * 5 + [1] * (vocab_size - 5),
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.token_type_count": 2,
    }


def encoder_file(arch: str, checkpoint: Path, config: Any, kind: str) -> GgufFile:
    first_position = config.pad_token_id + 1 if config.model_type == "xlm-roberta" else 0
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    own = {
        "context_length": config.max_position_embeddings - first_position,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "attention.causal": False,
        "pooling_type": 1,
    }
    if arch == "nomic-bert":
        own["rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    metadata = {f"{arch}.{key}": value for key, value in own.items()} | word_piece_vocabulary(config.vocab_size)
    file = GgufFile(arch, metadata)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if not name.startswith("pooler."):
            chosen = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 and ".layer" in name else "F32"]
            found = names.get_name(name.removeprefix("roberta."), try_suffixes=(".weight", ".bias"))
            if "position_embeddings" in name:
                tensor = tensor[first_position:]
            file.tensors[found] = quantize(tensor.numpy(), chosen), chosen
    return file


@pytest.mark.parametrize(
    ("preset", "arch", "kind"), [("bert", "bert", "F32"), ("bert", "bert", "Q8_0"), ("nomic", "nomic-bert", "F32")]
)
def test_vectors_are_those_of_the_checkpoint(preset: str, arch: str, kind: str, tmp_path: Path) -> None:
    model = make_encoder(preset, "Model", tmp_path / "checkpoint", type_vocab_size=2, intermediate_size=96)
    file = encoder_file(arch, tmp_path / "checkpoint", model.config, kind)
    model_dir = resolve_model(str(file.write(tmp_path / "model.gguf")))
    assert find_task(model_dir) == ModelTask("embed", True)
    forward_pass = EncoderPass.load(model_dir, PassOptions(dtype="fp32"))
    rows = random_rows((1, 17, 150))
    for row, vector in zip(rows, run_rows(forward_pass, rows, "embed"), strict=True):
        with torch.inference_mode():
            states = model(torch.from_numpy(row.astype(np.int64))[None]).last_hidden_state[0]
        assert cosine(states.mean(0).numpy(), vector) == pytest.approx(1.0, abs=1e-5 if kind == "F32" else 1e-3)
    forward_pass.close()


def reranker_file(tmp_path: Path) -> tuple[GgufFile, Any]:
    """A file as of BGE's rerankers, and the model."""
    model = make_encoder("xlm-roberta", "ForSequenceClassification", tmp_path / "checkpoint", num_labels=1)
    file = encoder_file("bert", tmp_path / "checkpoint", model.config, "F32")
    file.metadata |= {"bert.pooling_type": 4, "bert.classifier.output_labels": ["LABEL_0"]}
    return file, model


def test_reranker_scores_as_transformers(tmp_path: Path) -> None:
    file, model = reranker_file(tmp_path)
    model_dir = resolve_model(str(file.write(tmp_path / "model.gguf")))
    assert find_task(model_dir) == ModelTask("rerank", True)
    forward_pass = EncoderPass.load(model_dir, PassOptions(dtype="fp32"))
    rows = random_rows((2, 17, 150))
    for row, scores in zip(rows, run_rows(forward_pass, rows, "classify"), strict=True):
        ids = torch.from_numpy(row.astype(np.int64))[None]
        with torch.inference_mode():
            logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0].numpy()
        np.testing.assert_allclose(scores, logits, atol=1e-4)
    forward_pass.close()


@pytest.mark.parametrize(
    ("missing", "labels", "message"),
    [
        ("cls.weight", ["a"], r"tensor cls\.weight is missing, which a model with pooling_type 4 needs"),
        (
            "token_types.weight",
            ["a"],
            r"tensor token_types\.weight is missing: only classifiers of BERT's and RoBERTa's kind",
        ),
        (None, [1, 2], r"output_labels is \[1, 2\]; expected a list of strings"),
    ],
)
def test_reranker_with_another_head_is_refused(
    missing: str | None, labels: list[Any], message: str, tmp_path: Path
) -> None:
    """llama.cpp's converter drops BERT's pooler, and gives DistilBERT's classifier another activation."""
    file, _ = reranker_file(tmp_path)
    file.metadata["bert.classifier.output_labels"] = labels
    file.tensors.pop(missing, None)
    with pytest.raises(StartupError, match=message):
        resolve_model(str(file.write(tmp_path / "model.gguf")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bert.attention.causal": True}, "bert.attention.causal is True; this architecture is supported without"),
        ({"bert.expert_count": 8}, "bert.expert_count is 8"),
        ({"bert.block_count": 1}, r"tensor 'blk\.1\.\w+\.\w+' has no place in a Bert of"),
        ({"bert.pooling_type": 5}, "bert.pooling_type is 5"),
    ],
)
def test_encoder_of_another_kind_is_refused_by_key(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = make_encoder("bert", "Model", tmp_path / "checkpoint", type_vocab_size=2)
    file = encoder_file("bert", tmp_path / "checkpoint", model.config, "F32")
    file.metadata |= change
    with pytest.raises(StartupError, match=message):
        resolve_model(str(file.write(tmp_path / "model.gguf")))


def test_word_pieces_are_those_of_transformers() -> None:
    ours = Tokenizer.from_str(check_tokenizer(GgufTokenizer(word_piece_vocabulary()).tokenizer_json(adds_end=True)))
    theirs = BertTokenizer(vocab={token: index for index, token in enumerate(TOKENS)})
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"]
    pair = theirs(TEXTS[0], TEXTS[1])
    assert ours.encode(TEXTS[0], TEXTS[1]).ids == pair["input_ids"]
    assert ours.encode(TEXTS[0], TEXTS[1]).type_ids == pair["token_type_ids"]


def test_unigram_pieces_are_those_of_transformers() -> None:
    """XLM-RoBERTa's tokenizer, as in files of BGE-M3."""
    scored = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    scored += [
        (piece, -float(place)) for place, piece in enumerate(("\u2581the", "\u2581", "un", "able", "a", "e", "t"))
    ]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [piece for piece, _ in scored],
        "tokenizer.ggml.scores": [score for _, score in scored],
        "tokenizer.ggml.token_type": [3, 3, 3, 2] + [1] * (len(scored) - 4),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    ours = Tokenizer.from_str(check_tokenizer(GgufTokenizer(metadata).tokenizer_json(adds_end=True)))
    theirs = XLMRobertaTokenizer(vocab=scored)
    for text in ("the unable  tea", " the é", ""):
        assert ours.encode(text).ids == theirs(text)["input_ids"]
    assert ours.encode("the", "tea a").ids == theirs("the", "tea a")["input_ids"]


def test_vocabulary_with_capitals_keeps_them() -> None:
    metadata = word_piece_vocabulary()
    metadata["tokenizer.ggml.tokens"][5] = "\u2581The"
    tokenizer = Tokenizer.from_str(check_tokenizer(GgufTokenizer(metadata).tokenizer_json()))
    assert tokenizer.encode("The the").tokens == ["[CLS]", "The", "[UNK]"]


def test_byte_level_texts_of_an_encoder_begin_and_end_as_roberta_s() -> None:
    metadata = byte_level_vocabulary(320, "roberta-bpe") | {"tokenizer.ggml.seperator_token_id": 319}
    tokenizer = Tokenizer.from_str(check_tokenizer(GgufTokenizer(metadata).tokenizer_json(adds_end=True)))
    assert tokenizer.encode("the").tokens[:: len(tokenizer.encode("the")) - 1] == ["<|begin_of_text|>", "[PAD319]"]


def test_decoder_that_names_its_pooling_returns_vectors(tmp_path: Path) -> None:
    """Qwen3-Embedding's files: the last token is the end of the text."""
    model = make_model("qwen3", vocab_size=320)
    metadata = byte_level_vocabulary(320, "qwen2") | {"qwen3.pooling_type": 3, "tokenizer.ggml.add_eos_token": True}
    file = from_model("qwen3", model, lambda _: "F32", metadata)
    model_dir = resolve_model(str(file.write(tmp_path / "model.gguf")))
    pooled = read_pooled_decoder(model_dir, "auto", None)
    assert pooled is not None
    assert (pooled.head, pooled.normalizes) == ("embed", True)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert re.fullmatch(r".*<\|end_of_text\|>", "".join(tokenizer.encode("the").tokens))


def head_of(rows: NDArray[np.float32], kind: str) -> tuple[NDArray[np.generic], gguf.GGMLQuantizationType]:
    number = gguf.GGMLQuantizationType[kind]
    return quantize(rows, number), number


def qwen3_reranker(model: Any, kind: str = "F32") -> GgufFile:
    """A file as of Qwen3-Reranker: the head has the rows of "yes" (here token 7) and "no" (token 5)."""
    metadata = byte_level_vocabulary(320, "qwen2") | {
        "qwen3.pooling_type": 4,
        "qwen3.classifier.output_labels": ["yes", "no"],
    }
    file = from_model("qwen3", model, lambda _: kind, metadata)
    file.tensors["cls.output.weight"] = head_of(model.lm_head.weight[[7, 5]].detach().numpy(), kind)
    return file


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_decoder_with_the_rows_of_two_words_reranks_by_their_difference(kind: str, tmp_path: Path) -> None:
    model = make_model("qwen3", vocab_size=320)
    model_dir = resolve_model(str(qwen3_reranker(model, kind).write(tmp_path / "model.gguf")))
    assert find_task(model_dir) == ModelTask("rerank", False)
    assert PoolingFiles.load(model_dir).pair_template is QWEN3_RERANKER
    forward_pass = DecoderPass.load(model_dir, PassOptions(dtype="fp32"))
    forward_pass.create_cache(64, pooled_driver.PAGE, "fp32")
    rows = random_rows((2, 17))
    for row, scores in zip(rows, pooled_driver.run(forward_pass, rows, "classify"), strict=True):
        with torch.inference_mode():
            logits = model(torch.from_numpy(row.astype(np.int64))[None]).logits[0, -1]
        np.testing.assert_allclose(scores, [float(logits[7] - logits[5])], atol=1e-4 if kind == "F32" else 0.1)
    forward_pass.close()


@pytest.mark.parametrize("change", [{"labels": ["no", "yes"]}, {"head": None}, {"head": 3}])
def test_decoder_that_ranks_by_another_head_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    file = qwen3_reranker(make_model("qwen3", vocab_size=320))
    file.metadata["qwen3.classifier.output_labels"] = change.get("labels", ["yes", "no"])
    del file.tensors["cls.output.weight"]
    if (rows := change.get("head", 2)) is not None:
        file.tensors["cls.output.weight"] = head_of(np.zeros((rows, 64), np.float32), "F32")
    with pytest.raises(StartupError, match=r"qwen3\.pooling_type is 4, classifier\.output_labels is .* must have"):
        resolve_model(str(file.write(tmp_path / "model.gguf")))
