"""Checkpoints that are incomplete, truncated or of the wrong shape are refused in one line."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.encoders.read_config import read_encoder
from penstock.backend.checkpoint.encoders.weights import open_encoder
from penstock.backend.checkpoint.files.tokenizer_file import count_token_ids
from penstock.backend.checkpoint.hub import resolve_model
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from tests.backend.checkpoint.weight_files import INDEX, SHARDED, name_twice, open_checkpoint, rewrite
from tests.checkpoints import make_checkpoint
from tests.encoder_checkpoints import make_encoder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor


def refusal(model_dir: Path) -> str:
    with pytest.raises(StartupError) as refused:
        open_checkpoint(model_dir)
    return str(refused.value)


def test_directory_without_weights_is_refused(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path)
    (model_dir / "model.safetensors").unlink()
    assert refusal(model_dir).startswith(f"{model_dir} has neither model.safetensors nor {INDEX}: it has no weights")
    (model_dir / "pytorch_model.bin").touch()
    assert "it has pytorch_model.bin, and only safetensors are loaded" in refusal(model_dir)


def test_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path, **SHARDED)
    shard = sorted(model_dir.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"{shard} cannot be opened: No such file or directory" in refusal(model_dir)


@pytest.mark.parametrize("architecture", ["llama2", "qwen2", "qwen3", "phi3", "qwen3-moe", "mixtral"])
def test_missing_tensor_is_refused_with_name_shape_and_file(architecture: str, tmp_path: Path) -> None:
    model_dir = make_checkpoint(architecture, tmp_path)
    path = model_dir / "model.safetensors"
    whole = load_file(path)
    last_layer = read_decoder_config(model_dir).num_layers - 1
    names = [name for name in whole if f".{last_layer}." in name or ".layers." not in name]
    for name in names:
        save_file({other: tensor for other, tensor in whole.items() if other != name}, path)
        expected = f"tensor {name}, expected with shape {list(whole[name].shape)}, is missing from {path}"
        assert refusal(model_dir) == expected
    assert len(names) > 8


def test_tensor_missing_from_its_shard_is_refused(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path, **SHARDED)
    index = json.loads((model_dir / INDEX).read_text())
    shard = model_dir / index["weight_map"]["model.norm.weight"]
    rewrite(shard, {"model.norm.weight": None})
    assert refusal(model_dir) == f"tensor model.norm.weight is missing from {shard}, where {INDEX} says it is"
    del index["weight_map"]["model.norm.weight"]
    (model_dir / INDEX).write_text(json.dumps(index))
    assert "tensor model.norm.weight, expected with shape [64], is missing from the files of" in refusal(model_dir)


@pytest.mark.parametrize("sharding", [{}, SHARDED], ids=["single", "sharded"])
def test_tensor_named_twice_is_refused(sharding: dict[str, str], tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path, **sharding)
    path = next(path for path in model_dir.glob("model*.safetensors") if "model.norm.weight" in load_file(path))
    name_twice(path, "model.norm.weight")
    assert refusal(model_dir) == f"{path}: the header: 'model.norm.weight' occurs twice"


def test_wrong_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path)
    rewrite(model_dir / "model.safetensors", {"model.layers.1.mlp.up_proj.weight": torch.zeros(95, 64)})
    message = refusal(model_dir)
    assert "tensor model.layers.1.mlp.up_proj.weight has shape [95, 64]; config.json makes it [96, 64]" in message


LAYER = "model.layers.0."


@pytest.mark.parametrize(
    "name",
    [
        *(f"{LAYER}self_attn.q_proj.bias", f"{LAYER}self_attn.q_norm.weight", f"{LAYER}mlp.up_proj.bias"),
        *(f"{LAYER}mlp.up_proj.weight_scale", f"{LAYER}mlp.up_proj.pre_quant_scale", "model.norm.bias", "steps"),
        "lm_head.bias",
    ],
)
@pytest.mark.parametrize("preset", ["llama2", "llama-tied"])
def test_tensor_without_a_place_is_refused_by_name(preset: str, name: str, tmp_path: Path) -> None:
    model_dir = make_checkpoint(preset, tmp_path)
    rewrite(model_dir / "model.safetensors", {name: torch.ones(64)})
    message = f"tensor '{name}' has no place in a LlamaForCausalLM of this config.json; left out, it could change"
    assert refusal(model_dir).startswith(f"{model_dir / 'model.safetensors'}: {message}")


HARMLESS = (
    *(f"{LAYER}self_attn.rotary_emb.inv_freq", f"{LAYER}self_attn.k_proj.k_scale", f"{LAYER}mlp.up_proj.input_scale"),
    *("model.layers.3.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight", "vision_tower.patch.weight"),
    "model.multi_modal_projector.linear.weight",
)


def test_tensors_that_change_no_result_are_left_out(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama-tied", tmp_path)
    path = model_dir / "model.safetensors"
    embedding = load_file(path)["model.embed_tokens.weight"]
    rewrite(
        path,
        {name: torch.ones(3) for name in HARMLESS}
        | {f"{LAYER}self_attn.q_proj.bias": torch.zeros(64), "lm_head.weight": embedding.clone()},
    )
    with open_checkpoint(model_dir) as weights:
        assert weights.lm_head(Dtype.FP32) is None


@pytest.mark.parametrize("change", [lambda head: head[:-1].clone(), lambda head: head + 1])
def test_tied_head_that_is_another_matrix_is_refused(change: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """transformers would use it, against its config.json."""
    model_dir = make_checkpoint("llama-tied", tmp_path)
    path = model_dir / "model.safetensors"
    rewrite(path, {"lm_head.weight": change(load_file(path)["model.embed_tokens.weight"])})
    assert "set tie_word_embeddings to false, or remove the tensor" in refusal(model_dir)


def test_encoder_needs_a_place_for_all_but_other_heads(tmp_path: Path) -> None:
    model_dir = tmp_path / "bert"
    make_encoder("bert", "Model", model_dir)
    path = model_dir / "model.safetensors"
    harmless = ("pooler.dense.weight", "cls.predictions.bias", "embeddings.position_ids", "encoder.layer.9.x.weight")
    rewrite(path, {name: torch.ones(3) for name in harmless})
    with open_encoder(model_dir, read_encoder(model_dir)):
        pass
    name = "encoder.layer.0.attention.self.distance_embedding.weight"
    rewrite(path, {name: torch.ones(3)})
    with pytest.raises(StartupError, match=f"tensor '{name}' has no place in an encoder"):
        open_encoder(model_dir, read_encoder(model_dir))


def test_config_that_does_not_fit_the_weights_is_refused(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path)
    config = replace(read_decoder_config(model_dir), num_kv_heads=2)
    with pytest.raises(StartupError, match=r"k_proj\.weight has shape \[64, 64\]; config\.json makes it \[32, 64\]"):
        open_weights(model_dir, config)


def test_weights_that_are_not_floats_are_refused(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path)
    rewrite(model_dir / "model.safetensors", {"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    assert "tensor model.norm.weight has dtype 'I8'; it must be F32, F16, BF16" in refusal(model_dir)


@pytest.mark.parametrize("sharding", [{}, SHARDED], ids=["single", "sharded"])
def test_truncated_file_is_refused_with_both_sizes(sharding: dict[str, str], tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path, **sharding)
    path = sorted(model_dir.glob("model*.safetensors"))[-1]
    whole_bytes = path.stat().st_size
    os.truncate(path, whole_bytes - 1)
    assert refusal(model_dir) == f"{path} is truncated: expected {whole_bytes} bytes, found {whole_bytes - 1}"


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_file_truncated_in_its_header_is_refused(size: int, tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path)
    os.truncate(model_dir / "model.safetensors", size)
    message = refusal(model_dir)
    assert "is truncated: expected at least" in message
    assert message.endswith(f"found {size}")


TWICE = '{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}'


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000, TWICE]
)
def test_malformed_index_is_refused(content: str, tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path, **SHARDED)
    (model_dir / INDEX).write_text(content)
    assert INDEX in refusal(model_dir)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "a/b.safetensors",
        "..",
        "",
        ".safetensors",
        "model.bin",
        "a\0.safetensors",
    ],
)
def test_index_may_name_plain_files_only(name: str, tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path / "model", **SHARDED)
    (model_dir / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert f"weight_map names the file {name!r}; it must be a plain *.safetensors name" in refusal(model_dir)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "model.gguf"])
def test_git_lfs_pointer_is_refused_as_one(name: str, tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4877660776\n"
    model_dir = make_checkpoint("llama2", tmp_path)
    (model_dir / name).write_text(pointer)
    message = f"{name} is a git-lfs pointer and not the file itself; run git lfs pull in {tmp_path}"
    with pytest.raises(StartupError, match=re.escape(message)):
        read_all(model_dir / name)


def read_all(path: Path) -> None:
    if path.suffix == ".gguf":
        resolve_model(str(path))
    count_token_ids(path.parent)
    open_weights(path.parent, read_decoder_config(path.parent)).close()
