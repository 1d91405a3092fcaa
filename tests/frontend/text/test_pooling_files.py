"""Prompts, labels and activations as the libraries that wrote the files read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, TextClassificationPipeline

from penstock.frontend.generation.submission.pooled_scores import activated
from penstock.frontend.text.pooling_files import QWEN3_RERANKER, PoolingFiles


def write(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_files_that_are_missing_say_nothing(tmp_path: Path) -> None:
    assert PoolingFiles.load(tmp_path) == PoolingFiles()
    assert PoolingFiles.load(write(tmp_path, config={"model_type": "bert"})) == PoolingFiles()


@pytest.mark.parametrize(
    ("num_labels", "problem"),
    [
        (1, None),
        (1, "regression"),
        (1, "multi_label_classification"),
        (3, None),
        (3, "regression"),
        (3, "single_label_classification"),
        (3, "multi_label_classification"),
    ],
)
def test_scores_are_those_of_transformers_pipeline(tmp_path: Path, num_labels: int, problem: str | None) -> None:
    config = BertConfig(num_labels=num_labels, problem_type=problem, hidden_size=8, num_hidden_layers=0)
    config.save_pretrained(tmp_path)
    files = PoolingFiles.load(tmp_path)
    logits = [1.5, -0.25, 3.0][:num_labels]
    model = BertForSequenceClassification(config)
    pipeline = TextClassificationPipeline.__new__(TextClassificationPipeline)
    pipeline.model = model
    found = pipeline.postprocess({"logits": torch.tensor([logits])}, top_k=None)
    expected = {item["label"]: item["score"] for item in found}
    scores = activated(logits, files.activation_of(num_labels))
    assert {files.label(index): score for index, score in enumerate(scores)} == pytest.approx(expected)


@pytest.mark.parametrize(("content", "expected"), [({"max_seq_length": 256}, True), ({}, False), (None, False)])
def test_length_of_sentence_transformers_is_noticed(
    tmp_path: Path, content: dict[str, int] | None, expected: bool
) -> None:
    write(tmp_path, config={})
    if content is not None:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps(content))
    assert PoolingFiles.load(tmp_path).has_length is expected


@pytest.mark.parametrize("where", ["sentence_transformers", "older"])
def test_sentence_transformers_activation_goes_first(tmp_path: Path, where: str) -> None:
    name = "torch.nn.modules.linear.Identity"
    given = {"sentence_transformers": {"activation_fn": name}} if where != "older" else {}
    older = {"sbert_ce_default_activation_function": name} if where == "older" else {}
    write(tmp_path, config={"problem_type": "multi_label_classification", **given, **older})
    assert PoolingFiles.load(tmp_path).activation == "none"


def test_prompts_pooling_and_the_template_of_a_decoder_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        config={"model_type": "qwen3", "id2label": {"0": "no", "1": "yes", "7": "x"}},
        config_sentence_transformers={"prompts": {"query": "Q: ", "odd": 5}, "default_prompt_name": "query"},
    )
    (tmp_path / "1_Pooling").mkdir()
    write(tmp_path / "1_Pooling", config={"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True})
    files = PoolingFiles.load(tmp_path)
    assert (files.prompts, files.default_prompt_name) == ({"query": "Q: "}, "query")
    assert (files.labels, files.pooling, files.pair_template) == (("no", "yes"), "mean", QWEN3_RERANKER)
    assert files.label(5) == "LABEL_5"
