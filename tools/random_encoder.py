"""The files of `penstock random-model --architecture bert`: shapes and tokenizer of a BERT with random weights.

Its words are w0, w1, …: each is one token, so that a benchmark knows how long its texts are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_TOKEN_TYPES = 2


@dataclass(frozen=True, slots=True)
class BertDims:
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    vocab_size: int
    max_context: int


def bert_shapes(dims: BertDims) -> dict[str, tuple[int, ...]]:
    """The tensors of transformers' BertModel without its pooler."""
    hidden, middle = dims.hidden_size, dims.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (dims.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (dims.max_context, hidden),
        "embeddings.token_type_embeddings.weight": (_TOKEN_TYPES, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    matrices = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (middle, hidden),
        "output.dense": (hidden, middle),
    }
    for layer in range(dims.layers):
        prefix = f"encoder.layer.{layer}."
        for name, shape in matrices.items():
            shapes[f"{prefix}{name}.weight"] = shape
            shapes[f"{prefix}{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{prefix}{name}.weight"] = shapes[f"{prefix}{name}.bias"] = (hidden,)
    return shapes


def bert_config(dims: BertDims, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.intermediate_size,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": dims.max_context,
        "type_vocab_size": _TOKEN_TYPES,
        "pad_token_id": 0,
        "dtype": dtype,
    }


def sentence_transformers_files(dims: BertDims) -> dict[str, Any]:
    """Mean pooling and normalisation, by file name."""
    module = "sentence_transformers.models."
    return {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": f"{module}Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{module}Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{module}Normalize"},
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": dims.hidden_size, "pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": dims.max_context, "do_lower_case": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": dims.max_context,
            **{f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS},
        },
    }


def write_word_tokenizer(out: Path, vocab_size: int) -> None:
    words = (*SPECIAL_TOKENS, *(f"w{index}" for index in range(vocab_size - len(SPECIAL_TOKENS))))
    vocab = {token: index for index, token in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))  # noqa: S106 - a token's text
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.save(str(out / "tokenizer.json"))
