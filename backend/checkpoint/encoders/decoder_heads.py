"""Decoders that return vectors or scores instead of tokens.

Layouts: Qwen3-Embedding, E5-Mistral, Qwen3-Reranker and ForSequenceClassification. The result is computed from the last
token's hidden state after the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.backend.checkpoint.config.architectures.encoder_names import ANSWERS
from penstock.backend.checkpoint.config.architectures.names import decoder_of, find_architecture
from penstock.backend.checkpoint.config.tensors import EMBEDDING, LM_HEAD, TensorSpec
from penstock.backend.checkpoint.config_json import parse_decoder_config
from penstock.backend.checkpoint.encoders.pooled_decoder import PooledDecoder
from penstock.backend.checkpoint.encoders.sentence_transformers import read_max_tokens, read_modules
from penstock.backend.checkpoint.encoders.tasks import find_task
from penstock.backend.checkpoint.files.json_file import read_json_object, shorten
from penstock.backend.checkpoint.files.layout import CONFIG_FILE, TOKENIZER_FILE
from penstock.backend.checkpoint.formats.declared import read_stored_formats
from penstock.backend.checkpoint.formats.stored_weight import StoredWeight, find_weight
from penstock.backend.checkpoint.tensor_files.opening import fit_to_decoder, fit_vocab_size
from penstock.backend.checkpoint.weights import open_tensor_files
from penstock.backend.errors import StartupError
from penstock.backend.lazy_torch import Tensor, torch
from penstock.process.native_libraries import LibraryError

TASKS = ("auto", "generate", "embed", "rerank", "classify")
SCORES = "score.weight"
_BLOCK_VALUES = 1 << 22
_SUFFIXES = ("Model", "ForSequenceClassification", "ForCausalLM")


def read_pooled_decoder(model_dir: Path, task: str, max_context_tokens: int | None) -> PooledDecoder | None:
    """None if the decoder generates. task is one of TASKS. Raises StartupError."""
    if task not in TASKS:
        raise StartupError(f"--task is {shorten(task)}; it must be one of {', '.join(TASKS)}")
    chosen = find_task(model_dir).task if task == "auto" else task
    if chosen == "generate":
        return None
    path = model_dir / CONFIG_FILE
    values = read_json_object(path)
    name = _architecture(values)
    suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")
    decoder = decoder_of(name.removesuffix(suffix))
    if decoder is None:
        raise StartupError(
            f"{path}: architecture {shorten(name)} is not supported; docs/models.md has the encoders and decoders that "
            "return vectors or scores"
        )
    try:
        config = parse_decoder_config(values | {"architectures": [decoder]}, max_context_tokens)
    except StartupError as error:
        raise StartupError(f"{path}: {error}") from None
    limit = read_max_tokens(model_dir) or config.max_context_tokens
    config = replace(
        config,
        tie_embeddings=False,
        has_lm_head=False,
        vocab_size=fit_vocab_size(model_dir, config.vocab_size),
        scales=replace(config.scales, logits=1.0, logits_softcap=None),
        max_context_tokens=min(limit, config.max_context_tokens),
    )
    if chosen == "embed":
        return PooledDecoder(config, "embed", normalizes=_check_modules(model_dir))
    if suffix == "ForSequenceClassification":
        labels = values.get("id2label")
        count = len(labels) if isinstance(labels, dict) and labels else _num_labels(values)
        return PooledDecoder(replace(config, head_width=count), "score")
    if chosen == "rerank":
        return PooledDecoder(config, "yes or no")
    raise StartupError(f"--task is {task}; {name} has no head that classifies: it needs ForSequenceClassification")


def read_head(model_dir: Path, pooled: PooledDecoder) -> Tensor | None:
    """[width, hidden_size] fp32; None if the result is the hidden state itself. Raises StartupError."""
    hidden, vocab = pooled.config.hidden_size, pooled.config.vocab_size
    if pooled.head == "embed":
        return None
    with ExitStack() as closers:
        files, where = open_tensor_files(model_dir, closers)
        formats = read_stored_formats(model_dir)
        if pooled.head == "score":
            stored = find_weight(TensorSpec(SCORES, (pooled.width, hidden)), None, files, where)
            head = torch.empty(pooled.width, hidden)
            stored.copy(head, lambda _: None)
            return head
        if SCORES in files:  # a GGUF file has the rows of both words, and need not have lm_head
            spec, tokens = TensorSpec(SCORES, (len(ANSWERS), hidden)), list(range(len(ANSWERS)))
        else:
            files = fit_to_decoder(files, vocab)
            name = LM_HEAD if LM_HEAD in files else EMBEDDING
            spec, tokens = TensorSpec(name, (vocab, hidden)), _answer_tokens(model_dir, vocab)
        is_covered = spec.name != EMBEDDING or formats.cover_embedding
        stored = find_weight(spec, formats.of(spec.name) if is_covered else None, files, where)
        yes, no = _rows(stored, tokens)
        return (yes - no).view(1, hidden)


def _rows(stored: StoredWeight, indices: Sequence[int]) -> list[Tensor]:
    """Some rows of a matrix, fp32."""
    found: dict[int, Tensor] = {}
    start = 0
    for block in stored.blocks(_BLOCK_VALUES, lambda _: None):
        found |= {index: block[index - start].clone() for index in indices if start <= index < start + len(block)}
        start += len(block)
    return [found[index] for index in indices]


def _answer_tokens(model_dir: Path, vocab_size: int) -> list[int]:
    from penstock.process.native_libraries import GuardedTokenizer

    path = model_dir / TOKENIZER_FILE
    if not path.is_file():
        raise StartupError(f"{path} does not exist; a reranker without a head needs it to find its words yes and no")
    try:
        tokenizer = GuardedTokenizer.from_file(path)
    except LibraryError as error:
        raise StartupError(f"{path} cannot be used: {error}") from None
    tokens = []
    for word in ANSWERS:
        token = tokenizer.token_to_id(word)
        if token is None or token >= vocab_size:
            raise StartupError(f'{path} has no token "{word}", whose logit a reranker without a head compares')
        tokens.append(token)
    return tokens


def _check_modules(model_dir: Path) -> bool:
    """Whether the result is normalised."""
    modules = read_modules(model_dir)
    if modules is None:
        return False
    if modules.pooling not in ((), ("lasttoken",)):
        modes = ", ".join(modules.pooling)
        raise StartupError(f"{model_dir}: the pooling of a decoder is {modes}; only lasttoken is supported")
    if modules.dense:
        raise StartupError(f"{model_dir}: a Dense module behind a decoder is not supported")
    return modules.normalizes


def _architecture(values: dict[str, Any]) -> str:
    name = find_architecture(values)
    if not isinstance(name, str):
        raise StartupError(f"architectures is {shorten(name)}; it must name a decoder")
    return name


def _num_labels(values: dict[str, Any]) -> int:
    count = values.get("num_labels", 2)
    if not isinstance(count, int) or not 1 <= count <= 1 << 20:
        raise StartupError(f"num_labels is {shorten(count)}; it must be an integer from 1 to {1 << 20}")
    return count
