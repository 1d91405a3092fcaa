"""Qwen and Gemma 4 as two GGUF files, of the text model and of the vision part: embeddings are those of the safetensors
checkpoint, and tokens those of transformers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.backend.checkpoint.gguf import cached_directories
from penstock.backend.checkpoint.gguf.projector import read_projector
from penstock.backend.checkpoint.hub import resolve_model
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.forward_pass import DecoderPass
from penstock.backend.passes.vision.tower import VisionTower
from tests.backend.checkpoint.gguf.converted_tensors import converted, text_tensors
from tests.backend.checkpoint.gguf.writer import GgufFile, byte_level_vocabulary, from_model, gemma4_file
from tests.backend.passes.vision import test_pictures as plain
from tests.backend.passes.vision import test_qwen_pictures as qwen

F32 = gguf.GGMLQuantizationType.F32
VOCAB_SIZE = 320
_NORMALS = {"clip.vision.image_mean": list(qwen.MEAN), "clip.vision.image_std": list(qwen.STD)}
PROJECTORS = {
    "qwen2-vl": ("qwen2vl", "qwen2vl_merger"),
    "qwen2.5-vl": ("qwen2vl", "qwen2.5vl_merger"),
    "qwen3-vl": ("qwen3vl", "qwen3vl_merger"),
    "qwen3.5-vision": ("qwen35", "qwen3vl_merger"),
}
"""Preset → general.architecture of the text model, clip.projector_type."""
_DEEPSTACK = re.compile(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(norm|fc1|fc2)(.*)")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_directories, "cache_directory", lambda: tmp_path / "cache")


def qwen_file(kind: str, vision: Any, tensors: dict[str, torch.Tensor], *, swaps: bool = False) -> GgufFile:
    """As llama.cpp's converter writes it. swaps: up and down of the MLP, as old converters do."""
    width = getattr(vision, "embed_dim", vision.hidden_size)
    metadata: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        "clip.vision.projection_dim": 64,
        "clip.vision.image_size": 560,
        "clip.vision.patch_size": vision.patch_size,
        "clip.vision.embedding_length": width,
        "clip.vision.feed_forward_length": getattr(vision, "intermediate_size", vision.hidden_size),
        "clip.vision.block_count": vision.depth,
        "clip.vision.attention.head_count": vision.num_heads,
        "clip.vision.attention.layer_norm_epsilon": 1e-5,  # the text model's, which towers do not use
        **_NORMALS,
    }
    indexes = getattr(vision, "deepstack_visual_indexes", [])
    match kind:
        case "qwen2.5vl_merger":
            metadata |= {"clip.use_silu": True, "clip.vision.n_wa_pattern": vision.fullatt_block_indexes[0] + 1}
        case "qwen3vl_merger":
            flags = [index in indexes for index in range(vision.depth)]
            metadata |= {"clip.use_gelu": True, "clip.vision.is_deepstack_layers": flags}
            metadata["clip.vision.spatial_merge_size"] = vision.spatial_merge_size
    file, names = GgufFile("clip", metadata), gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    for full, tensor in tensors.items():
        name = full.removeprefix("model.")
        if not name.startswith("visual."):
            continue
        parts = {name: tensor}
        if "patch_embed.proj.weight" in name:
            parts = {"v.patch_embd.weight": tensor[:, :, 0], "v.patch_embd.weight.1": tensor[:, :, 1]}
        elif (found := _DEEPSTACK.match(name)) is not None:
            parts = {f"v.deepstack.{indexes[int(found[1])]}.{found[2]}{found[3]}": tensor}
        elif ".merger." in name and kind == "qwen3vl_merger":
            part = name.removeprefix("visual.merger.").replace("linear_fc1", "mm.0").replace("linear_fc2", "mm.2")
            parts = {part.replace("norm", "v.post_ln"): tensor}
        elif ".qkv." in name and kind != "qwen3vl_merger":
            parts = {name.replace("qkv", part): rows for part, rows in zip("qkv", tensor.chunk(3), strict=True)}
        for own, values in parts.items():
            stored = own if own.startswith(("v.", "mm.")) else names.get_name(own, try_suffixes=(".weight", ".bias"))
            assert stored is not None, own
            if swaps:
                stored = re.sub(r"ffn_(?:up|down)", "ffn_down" if "ffn_up" in stored else "ffn_up", stored)
            file.tensors[stored] = np.ascontiguousarray(values.float().numpy()), F32
    return file


@pytest.mark.parametrize("name", PROJECTORS)
def test_qwens_two_files_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    arch, kind = PROJECTORS[name]
    more: dict[str, Any] = {"window_size": 112} if name == "qwen2.5-vl" else {}
    checkpoint = tmp_path / "checkpoint"
    oracle = qwen.make_oracle(name, checkpoint, more, vocab_size=VOCAB_SIZE)
    tensors, text = load_file(checkpoint / "model.safetensors"), oracle.config.get_text_config()
    text.tie_word_embeddings = False
    file = from_model(
        arch, oracle, lambda _: "F32", byte_level_vocabulary(VOCAB_SIZE), converted(arch, text_tensors(tensors), text)
    )
    vision = oracle.config.vision_config
    if (added := len(getattr(vision, "deepstack_visual_indexes", ()))) > 0:
        file.metadata[f"{arch}.n_deepstack_layers"] = added
    model = file.write(tmp_path / "model.gguf")
    qwen_file(kind, vision, tensors, swaps=name == "qwen2-vl").write(tmp_path / "mmproj-F32.gguf")
    directory = resolve_model(str(model))
    towers = [VisionTower.load(each, PassOptions()) for each in (checkpoint, directory)]
    grid = (1, 30, 32)
    pixels = np.random.default_rng(3).integers(0, 256, (grid[1] * grid[2], qwen.PATCH_VALUES), np.uint8)
    expected, found = (tower.encode(pixels, grid, lambda: None) for tower in towers if tower is not None)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    bench = qwen.QwenBench(directory)
    prompt = qwen.Prompt(bench.memory)
    bench.ask(prompt, 0)
    bench.run()
    qwen.check(bench, 0, oracle, prompt)
    bench.close()


def gemma4_projector(vision: Any, tensors: dict[str, torch.Tensor]) -> GgufFile:
    """As llama.cpp's converter writes it."""
    metadata: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.vision.projector_type": "gemma4v",
        "clip.vision.projection_dim": 64,
        "clip.vision.image_size": 224,
        "clip.vision.patch_size": vision.patch_size,
        "clip.vision.embedding_length": vision.hidden_size,
        "clip.vision.feed_forward_length": vision.intermediate_size,
        "clip.vision.block_count": vision.num_hidden_layers,
        "clip.vision.attention.head_count": vision.num_attention_heads,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        **_NORMALS,
    }
    ends = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
    file, names = GgufFile("clip", metadata), gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 128)
    for name, tensor in tensors.items():
        if "language_model" in name or "lm_head" in name:
            continue
        own = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        if own.endswith("position_embedding_table"):
            own += ".weight"
        if own.endswith("patch_embedder.input_proj.weight"):
            tensor = tensor.view(len(tensor), vision.patch_size, vision.patch_size, 3).permute(0, 3, 1, 2)
        stored = names.get_name(own, try_suffixes=ends)
        assert stored is not None, own
        file.tensors[stored] = np.ascontiguousarray(np.atleast_1d(tensor.float().numpy())), F32
    return file


@pytest.mark.parametrize("name", ["gemma4", "gemma4-e"])
def test_gemmas_two_files_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    is_small, model, checkpoint = name == "gemma4-e", plain.MODELS[name], tmp_path / "checkpoint"
    tables = {"vocab_size_per_layer_input": VOCAB_SIZE} if is_small else {}
    model = replace(
        model,
        text_settings=model.text_settings | {"vocab_size": VOCAB_SIZE} | tables,
        vision=model.vision | {"use_clipped_linears": is_small},
    )
    oracle = plain.make_oracle(model, checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    for key, tensor in tensors.items():
        if key.endswith(("_max", "_min")):
            tensor.fill_(0.7 if key.endswith("_max") else -0.6)
        if "std_" in key:
            tensor.copy_(1 + torch.rand(tensor.shape))
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    oracle = type(oracle).from_pretrained(checkpoint).eval()
    text = oracle.config.get_text_config()
    text.tie_word_embeddings = False
    own = {key: values for key, values in text_tensors(tensors).items() if "vision" not in key}
    shim = SimpleNamespace(config=text, state_dict=lambda: own)
    gguf_model = gemma4_file(shim, byte_level_vocabulary(VOCAB_SIZE)).write(tmp_path / "model.gguf")
    gemma4_projector(oracle.config.vision_config, tensors).write(tmp_path / "mmproj-F32.gguf")
    directory = resolve_model(str(gguf_model))
    served: Any = DecoderPass.load(directory, PassOptions(dtype="fp32", max_running=4, max_batch_tokens=20))
    described = DecoderPass.describe(directory, PassOptions(dtype="fp32", max_running=4, max_batch_tokens=20))
    assert (described.whole_picture_tokens > 0) == (not is_small)
    served._spec = replace(served.spec, max_picture_bytes=described.max_picture_bytes)
    plain.check_answers(served, model, oracle, sees_whole=not is_small)
    served.close()


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("qwen2.5-vl", "n_wa_pattern", 9, r"n_wa_pattern is 9; it is from 1 to block_count, 2"),
        ("qwen3-vl", "is_deepstack_layers", [True, False], r"is_deepstack_layers is .*expected 3 integers"),
        ("qwen3-vl", "is_deepstack_layers", [True] * 3, r"has 3 layers; the model's n_deepstack_layers is 2"),
        ("qwen2-vl", "spatial_merge_size", 1 << 20, r"spatial_merge_size is 1048576; it is from"),
    ],
)
def test_sizes_in_the_metadata_are_checked(name: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    oracle = qwen.make_oracle(name, tmp_path / "checkpoint")
    tensors = load_file(tmp_path / "checkpoint" / "model.safetensors")
    file = qwen_file(PROJECTORS[name][1], oracle.config.vision_config, tensors)
    text = {"hidden_size": 64, "n_deepstack_layers": 2 if name == "qwen3-vl" else None}
    read_projector(file.write(tmp_path / "good.gguf"), text)
    file.metadata[f"clip.vision.{key}"] = value
    with pytest.raises(StartupError, match=message):
        read_projector(file.write(tmp_path / "bad.gguf"), text)
