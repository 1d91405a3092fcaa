"""Names in quantization_config: which linears they mean."""

from __future__ import annotations

import pytest

from penstock.backend.checkpoint.formats.module_names import is_excluded, is_target

GATE = "model.layers.1.mlp.gate_proj"


@pytest.mark.parametrize(
    ("name", "excluded"),
    [
        ("gate_proj", True),
        ("mlp.gate_proj", True),
        ("model.layers.1", True),
        ("model.layers.1.mlp", True),
        (r"model\.layers\.\d+\.mlp", True),
        ("model.language_model.layers.1", True),
        ("language_model.model.layers.1.mlp.gate_proj", True),
        ("gate", False),
        ("mlp.gate", False),
        ("model.layers.11", False),
        ("layers.1.self_attn", False),
        ("visual", False),
    ],
)
def test_excluded_name_is_whole_components(name: str, excluded: bool) -> None:
    assert is_excluded(GATE, ["lm_head", name]) == excluded


@pytest.mark.parametrize(
    ("name", "targeted"),
    [
        ("Linear", True),
        (GATE, True),
        ("re:.*gate_proj$", True),
        ("re:model.layers", True),
        ("re:model.language_model.*", True),
        ("model.language_model.layers.1.mlp.gate_proj", True),
        ("re:.*q_proj", False),
        ("re:gate_proj", False),
        ("mlp.gate_proj", False),
        ("Conv1d", False),
    ],
)
def test_target_is_a_class_a_whole_name_or_an_expression(name: str, targeted: bool) -> None:
    assert is_target(GATE, [name]) == targeted


def test_lm_head_of_a_model_that_reads_images_is_found() -> None:
    assert is_target("lm_head", ["language_model.lm_head"])
    assert is_excluded("lm_head", ["language_model.lm_head"])
