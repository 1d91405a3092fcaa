"""generation_config.json → end tokens and default sampling."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from penstock.backend.checkpoint.generation_config import read_generation_defaults
from penstock.backend.errors import StartupError
from penstock.shm.messages import Sampling
from tests.checkpoints import make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def write(model_dir: Path, config: dict[str, Any], generation: Any = None) -> Path:
    (model_dir / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (model_dir / "generation_config.json").write_text(json.dumps(generation))
    return model_dir


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [2, 7]}, None, (2, 7)),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 6, 5]}, (5, 6)),
        ({"eos_token_id": 2}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": 2}, {"eos_token_id": None}, (2,)),
        ({"eos_token_id": None}, {}, ()),
        ({}, None, ()),
    ],
)
def test_end_tokens_come_from_generation_config_or_else_config(
    config: dict[str, Any], generation: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert read_generation_defaults(write(tmp_path, config, generation)).eos_token_ids == expected


def test_sampling_settings_become_the_defaults_and_others_are_ignored(tmp_path: Path) -> None:
    generation = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    other = {"max_new_tokens": 100, "transformers_version": "5", "seed": 3, "min_p": None}
    defaults = read_generation_defaults(write(tmp_path, {}, generation | other))
    assert defaults.sampling == Sampling(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05)


def test_sampling_without_settings_has_the_apis_defaults(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama3", tmp_path)
    defaults = read_generation_defaults(model_dir)
    assert defaults.sampling == Sampling()
    assert defaults.eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": -5}, "top_k is -5"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"repetition_penalty": 1e9}, "repetition_penalty is 1000000000"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": list(range(65))}, "eos_token_id is"),
        ({"eos_token_id": [1, 1 << 31]}, r"eos_token_id\[1\] is 2147483648"),
        ([], "is not a JSON object"),
    ],
)
def test_value_out_of_bounds_is_refused_with_file_field_and_value(
    generation: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=rf"generation_config\.json.*{message}"):
        read_generation_defaults(write(tmp_path, {}, generation))
