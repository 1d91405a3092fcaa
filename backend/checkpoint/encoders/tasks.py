"""The task of a model directory, by its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from penstock.backend.checkpoint.config.architectures.encoder_names import ANSWERS
from penstock.backend.checkpoint.encoders.families import split_architecture
from penstock.backend.checkpoint.encoders.sentence_transformers import read_modules
from penstock.backend.checkpoint.files.json_file import read_json_object
from penstock.backend.checkpoint.files.layout import CONFIG_FILE

Task: TypeAlias = Literal["generate", "embed", "rerank", "classify", "token-classify", "sparse"]


@dataclass(frozen=True, slots=True)
class ModelTask:
    task: Task
    is_encoder: bool
    """The encoder pass serves it; otherwise the decoder pass does."""

    @property
    def forward_pass(self) -> str:
        """The installed name of the pass."""
        return "encoder" if self.is_encoder else "decoder"


def find_task(model_dir: Path) -> ModelTask:
    """The task of a checkpoint: an encoder's by its architecture and modules.json, a decoder's by the same files.

    A classifier of one label is a reranker, and so is a decoder whose labels are ANSWERS. Raises StartupError for files
    that cannot be read, and for an encoder that is not supported.
    """
    values = read_json_object(model_dir / CONFIG_FILE)
    found = split_architecture(values)
    suffix = _suffix(values) if found is None else found[1]
    labels = values.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) and labels else values.get("num_labels", 2)
    modules = read_modules(model_dir)
    task: Task
    if suffix == "ForSequenceClassification":
        task = "rerank" if num_labels == 1 else "classify"
    elif suffix == "ForTokenClassification":
        task = "token-classify"
    elif modules is not None and modules.is_splade:
        task = "sparse"
    elif modules is not None or suffix == "Model":
        task = "embed"
    elif found is not None:
        task = "sparse"
    else:
        task = "rerank" if isinstance(labels, dict) and tuple(labels.values()) == ANSWERS else "generate"
    return ModelTask(task, found is not None)


def _suffix(values: dict[str, object]) -> str:
    architectures = values.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else ""
    suffixes = ("ForSequenceClassification", "ForTokenClassification", "Model")
    return next((suffix for suffix in suffixes if str(name).endswith(suffix)), "")
