"""A checkpoint's files → end tokens and default sampling."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from penstock.backend.checkpoint.files.generation_config import read_generation_defaults
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
        ({"eos_token_id": 2}, {"eos_token_id": [5, 6, 5]}, (5, 6, 2)),
        ({"eos_token_id": 2}, {"eos_token_id": 0}, (0, 2)),
        ({"eos_token_id": 2}, {"eos_token_id": None}, (2,)),
        ({"eos_token_id": -1}, {"eos_token_id": [-1, 4]}, (4,)),
        ({"eos_token_id": None}, {}, ()),
        ({}, None, ()),
    ],
)
def test_end_tokens_come_from_generation_config_and_config(
    config: dict[str, Any], generation: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert read_generation_defaults(write(tmp_path, config, generation)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "tokenizer_config", "special_tokens", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token": "<|im_end|>"}, None, (7,)),  # 2 is the class's default: a piece of text
        ({"eos_token_id": 8}, {"eos_token": {"content": "<|im_end|>"}}, None, (7, 8)),
        ({"eos_token_id": 2}, {"eos_token": None}, {"eos_token": "<|im_end|>"}, (2,)),
        ({"eos_token_id": 2}, {}, {"eos_token": "<|im_end|>"}, (7,)),
        ({}, {"eos_token": "b"}, None, (2,)),
        ({}, {"eos_token": "unheard of"}, None, ()),
    ],
)
def test_end_tokens_come_from_the_tokenizers_files_too(
    config: dict[str, Any], tokenizer_config: Any, special_tokens: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    added = [{"id": 7, "content": "<|im_end|>"}, {"id": 8, "content": "<|end|>"}]
    tokenizer = {"added_tokens": added, "model": {"vocab": {"a": 1, "b": 2}}}
    files = {"tokenizer": tokenizer, "tokenizer_config": tokenizer_config, "special_tokens_map": special_tokens}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content or {}))
    assert read_generation_defaults(write(tmp_path, config)).eos_token_ids == expected


def test_sampling_settings_become_the_defaults_and_others_are_ignored(tmp_path: Path) -> None:
    generation = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    other = {"max_new_tokens": 100, "transformers_version": "5", "seed": 3, "min_p": None}
    defaults = read_generation_defaults(write(tmp_path, {}, generation | other))
    assert defaults.sampling == Sampling(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05)
    assert not defaults.not_applied


def test_top_p_0_leaves_the_likeliest_token_alone_and_unsupported_settings_are_named(tmp_path: Path) -> None:
    defaults = read_generation_defaults(write(tmp_path, {}, {"top_p": 0.0, "num_beams": 4, "no_repeat_ngram_size": 0}))
    assert defaults.sampling == Sampling(top_p=1e-6)
    assert defaults.not_applied == {"num_beams": 4}


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
        ({"top_p": -0.1}, r"top_p is -0\.1"),
        ({"top_k": -5}, "top_k is -5"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"repetition_penalty": 1e9}, "repetition_penalty is 1000000000"),
        ({"eos_token_id": -2}, "eos_token_id is -2"),
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
