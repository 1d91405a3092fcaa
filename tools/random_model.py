"""`penstock random-model`: a checkpoint of given dimensions with random weights, for benchmarks and tests.

Its output means nothing, but it is text: the checkpoint has a byte-level tokenizer that decodes every id. An encoder's
words are w0, w1, …: each is one token, so that a benchmark knows how long its texts are. `random_weights` has models in
memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, Literal

import torch
from cyclopts import Parameter
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from penstock.backend.checkpoint.config.tensors import expected_tensors
from penstock.backend.checkpoint.config_json import parse_decoder_config
from penstock.backend.checkpoint.files.layout import INDEX_FILE, SINGLE_FILE
from penstock.backend.errors import StartupError
from penstock.process.failure import fail
from penstock.process.options import format_size

WEIGHT_STD = 0.02
MAX_SHARD_BYTES = 1_000_000_000
MIN_VOCAB_SIZE = 512
MAX_VOCAB_SIZE = 900_000
"""The number of tokens that `_merges` can make."""

END_TOKEN, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_TOKEN_TYPES = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, kw_only=True)
class ModelDims:
    """The dimensions of a random model. The defaults are those of the benchmarks."""

    hidden_size: int = 768
    """Width of the residual stream."""
    layers: int = 12
    """Decoder layers."""
    heads: int = 12
    """Query heads. The width of a head is hidden-size / heads."""
    kv_heads: int = 4
    """Key and value heads. Must divide heads."""
    intermediate_size: int = 2048
    """Width of the MLP."""
    vocab_size: int = 32000
    """Tokens of the tokenizer, and width of the logits."""
    tie: bool = True
    """One matrix for embedding and logits."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of the stored weights."""
    architecture: Literal["llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "smollm3", "phi3", "bert"] = "llama"
    """Architecture of the layers. bert is an encoder with mean pooling: kv-heads, tie and experts do not apply."""
    experts: int = 64
    """Experts of each layer, for qwen3-moe, as the next two options."""
    experts_per_token: int = 8
    """Experts that a token uses."""
    expert_size: int = 384
    """Width of an expert's MLP."""
    max_context: int = 4096
    """Longest sequence in tokens."""
    seed: int = 0
    """The same seed gives the same weights."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RandomModelOptions(ModelDims):
    """Write a checkpoint with random weights and a tokenizer, for benchmarks."""

    out: Path
    """Directory to write. It is created if it does not exist, and must be empty."""


def run_random_model(options: RandomModelOptions) -> int:
    """Run the command; return the exit status."""
    try:
        num_bytes = write_random_model(options.out, options)
    except StartupError as error:
        fail("penstock random-model", str(error))
    except OSError as error:
        fail("penstock random-model", f"{options.out} cannot be written: {error.strerror or error}")
    print(f"{options.out}: {format_size(num_bytes)} of weights", file=sys.stderr)
    return 0


def write_random_model(out: Path, dims: ModelDims, max_shard_bytes: int = MAX_SHARD_BYTES) -> int:
    """Write a Hugging Face checkpoint to the empty or new directory out; return the size of its weights in bytes.

    At most one shard of max_shard_bytes (or one tensor, if that is larger) is in memory. Raises StartupError if the
    dimensions do not fit each other, OSError if out cannot be written.
    """
    if not MIN_VOCAB_SIZE <= dims.vocab_size <= MAX_VOCAB_SIZE:
        raise StartupError(f"vocab_size is {dims.vocab_size}; it must be from {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE}")
    is_bert = dims.architecture == "bert"
    config = _bert_config(dims) if is_bert else _config_json(dims)
    if is_bert:
        shapes = _bert_shapes(dims)
    else:
        shapes = {part.name: part.shape for part in expected_tensors(parse_decoder_config(config))}
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise StartupError(f"{out} is not empty")
    if is_bert:
        for name, content in sentence_transformers_files(dims.hidden_size, dims.max_context).items():
            (out / name).parent.mkdir(exist_ok=True)
            _write_json(out / name, content)
        _write_word_tokenizer(out, dims.vocab_size)
    else:
        generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(out / "generation_config.json", generation)
        _write_tokenizer(out, dims.vocab_size)
    num_bytes = _write_weights(out, shapes, _DTYPES[dims.dtype], dims.seed, max_shard_bytes)
    # Last: a directory with a config.json is complete.
    _write_json(out / "config.json", config)
    return num_bytes


def _config_json(dims: ModelDims) -> dict[str, Any]:
    return _own_keys(dims) | {
        "architectures": [_ARCHITECTURES[dims.architecture]],
        "model_type": dims.architecture.replace("-", "_"),
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.intermediate_size,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": dims.max_context,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": dims.tie,
        "dtype": _DTYPE_NAMES[dims.dtype],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def _own_keys(dims: ModelDims) -> dict[str, Any]:
    """Settings that only some architectures need."""
    match dims.architecture:
        case "qwen3":  # its heads are 128 wide by default
            return {"head_dim": dims.hidden_size // max(dims.heads, 1)}
        case "qwen3-moe":
            return {
                "num_experts": dims.experts,
                "num_experts_per_tok": dims.experts_per_token,
                "moe_intermediate_size": dims.expert_size,
                "norm_topk_prob": True,
            }
    return {}


def _write_weights(
    out: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int, max_shard_bytes: int
) -> int:
    shards = list(_shards(shapes, dtype.itemsize, max_shard_bytes))
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _random_tensor(name, shapes[name], dtype, generator) for name in names}
        save_file(tensors, out / file, metadata={"format": "pt"})
        # save_file lets only the owner read the file.
        (out / file).chmod(0o644)
        weight_map |= dict.fromkeys(names, file)
    num_bytes = sum(_num_bytes(shape, dtype.itemsize) for shape in shapes.values())
    if len(shards) > 1:
        _write_json(out / INDEX_FILE, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})
    return num_bytes


def _num_bytes(shape: tuple[int, ...], item_bytes: int) -> int:
    return torch.Size(shape).numel() * item_bytes


def _shards(shapes: dict[str, tuple[int, ...]], item_bytes: int, max_shard_bytes: int) -> Iterator[list[str]]:
    """Yield the names of each shard, in order. A shard ends before the tensor that would make it too large."""
    names: list[str] = []
    num_bytes = 0
    for name, shape in shapes.items():
        size = _num_bytes(shape, item_bytes)
        if names and num_bytes + size > max_shard_bytes:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += size
    yield names


def _random_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if "norm" in name.lower():
        return torch.zeros(shape, dtype=dtype) if name.endswith("bias") else torch.ones(shape, dtype=dtype)
    tensor = torch.empty(shape, dtype=dtype).normal_(0.0, WEIGHT_STD, generator=generator)
    if name in ("lm_head.weight", "model.embed_tokens.weight"):
        # The logit of the end token is 0, which is never the largest: greedy output runs to max_tokens.
        tensor[0] = 0
    return tensor


def _write_tokenizer(out: Path, vocab_size: int) -> None:
    """Byte-level BPE: special tokens, the 256 bytes, then synthetic syllables, most common letters first."""
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = vocab_size - len(SPECIAL_TOKENS) - len(byte_tokens)
    merges = list(islice(_merges(), num_merges))
    vocab = {token: i for i, token in enumerate(chain(SPECIAL_TOKENS, byte_tokens, (a + b for a, b in merges)))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_TOKEN,
            "eos_token": END_TOKEN,
            "pad_token": END_TOKEN,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _merges() -> Iterator[tuple[str, str]]:
    """Yield pairs that make up to four letters, with and without a space before them (written Ġ).

    Both parts of a pair are letters or results of earlier pairs.
    """
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    pairs = ["".join(pair) for pair in product(letters, repeat=2)]
    yield from product(letters, repeat=2)
    yield from (("Ġ", letter) for letter in letters)
    yield from (("Ġ", pair) for pair in pairs)
    yield from product(pairs, letters)
    yield from product([f"Ġ{pair}" for pair in pairs], letters)
    yield from product(pairs, pairs)
    yield from product([f"Ġ{pair}" for pair in pairs], pairs)


# ---- An encoder: transformers' BertModel without its pooler ----


def _bert_shapes(dims: ModelDims) -> dict[str, tuple[int, ...]]:
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


def _bert_config(dims: ModelDims) -> dict[str, Any]:
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
        "dtype": _DTYPE_NAMES[dims.dtype],
    }


def sentence_transformers_files(hidden_size: int, max_tokens: int) -> dict[str, Any]:
    """Mean pooling and normalisation, by file name."""
    module = "sentence_transformers.models."
    return {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": f"{module}Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{module}Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{module}Normalize"},
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": hidden_size, "pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_tokens,
            **{f"{token[1:-1].lower()}_token": token for token in BERT_TOKENS},
        },
    }


def _write_word_tokenizer(out: Path, vocab_size: int) -> None:
    words = (*BERT_TOKENS, *(f"w{index}" for index in range(vocab_size - len(BERT_TOKENS))))
    vocab = {token: index for index, token in enumerate(words)}
    word_piece_tokenizer(vocab).save(str(out / "tokenizer.json"))


def word_piece_tokenizer(vocab: dict[str, int] | None = None) -> Tokenizer:
    """An uncased tokenizer as BERT has it (arXiv 1810.04805), whose first tokens are BERT_TOKENS. Train one without a
    vocabulary."""
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))  # noqa: S106 - a token's text
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, BERT_TOKENS.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
