"""Settings of embeddings and scores from the files of a checkpoint.

They are prompts, labels, the activation of scores, and the text into which a decoder that reranks puts a pair.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

Activation: TypeAlias = Literal["none", "sigmoid", "softmax"]

_QWEN3_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The text of a pair for a decoder. prefix and suffix are never truncated. Source: Qwen3-Reranker's model card."""

    prefix: str
    suffix: str
    default_instruction: str

    def text(self, query: str, document: str, instruction: str | None) -> str:
        return f"<Instruct>: {instruction or self.default_instruction}\n<Query>: {query}\n<Document>: {document}"


QWEN3_RERANKER = PairTemplate(_QWEN3_PREFIX, _QWEN3_SUFFIX, _QWEN3_INSTRUCTION)


@dataclass(frozen=True, slots=True)
class PoolingFiles:
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that go before an input, by name, as in sentence-transformers."""
    default_prompt_name: str | None = None
    labels: tuple[str, ...] = ()
    """Names of the classes in the order of the logits; empty if the model names none."""
    activation: Activation | None = None
    """The function from logits to scores; None leaves it to the number of classes."""
    pair_template: PairTemplate | None = None
    pooling: str | None = None
    """How tokens become one vector according to sentence-transformers' files, such as "cls" or "mean"."""
    has_own_limit: bool = False
    """sentence-transformers' files name max_seq_length, to which that library truncates."""

    def activation_of(self, num_classes: int) -> Activation:
        """Return the activation. As in transformers' pipeline, one class defaults to a sigmoid, several to
        a softmax."""
        if num_classes == 1 and self.activation in (None, "softmax"):
            return "sigmoid"
        return self.activation or "softmax"

    def label(self, index: int) -> str:
        return self.labels[index] if index < len(self.labels) else f"LABEL_{index}"

    @classmethod
    def load(cls, model_dir: Path) -> PoolingFiles:
        """Read the files that exist. Raises ValueError or OSError."""
        config = read_object(model_dir / "config.json")
        sentence = read_object(model_dir / "config_sentence_transformers.json")
        prompts = {name: text for name, text in _object(sentence, "prompts").items() if isinstance(text, str)}
        default_name = sentence.get("default_prompt_name")
        return cls(
            prompts=prompts,
            default_prompt_name=default_name if default_name in prompts else None,
            labels=_labels(config),
            activation=_activation(config),
            pair_template=QWEN3_RERANKER if config.get("model_type") == "qwen3" else None,
            pooling=_pooling(model_dir),
            has_own_limit=any(
                isinstance(read_object(path).get("max_seq_length"), int)
                for path in model_dir.glob("sentence_*_config.json")
            ),
        )


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object, which may have Python's Infinity and NaN; empty if there is no such file. Raises
    ValueError or OSError."""
    values = json.loads(path.read_bytes()) if path.is_file() else {}
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return values


def _object(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """id2label's names for 0, 1, … up to the first gap."""
    named = _object(config, "id2label")
    labels: list[str] = []
    while str(len(labels)) in named:
        labels.append(str(named[str(len(labels))]))
    return tuple(labels)


def _activation(config: Mapping[str, Any]) -> Activation | None:
    """Return sentence-transformers' activation_fn, a class of torch, or else the one for transformers' problem_type."""
    declared = _object(config, "sentence_transformers").get("activation_fn")
    declared = declared or config.get("sbert_ce_default_activation_function")
    by_class: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
    if isinstance(declared, str) and (name := declared.rpartition(".")[2]) in by_class:
        return by_class[name]
    by_problem: dict[str, Activation] = {
        "regression": "none",
        "multi_label_classification": "sigmoid",
        "single_label_classification": "softmax",
    }
    problem = config.get("problem_type")
    return by_problem.get(problem) if isinstance(problem, str) else None


def _pooling(model_dir: Path) -> str | None:
    pooling = read_object(model_dir / "1_Pooling" / "config.json")
    modes = {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_lasttoken": "last_token",
    }
    return next((name for key, name in modes.items() if pooling.get(key) is True), None)
