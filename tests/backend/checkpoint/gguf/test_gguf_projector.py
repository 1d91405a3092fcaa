"""Vision parts in GGUF files with llama.cpp's names: the embeddings are those of the safetensors checkpoint."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.backend.checkpoint.gguf import cached_directories
from penstock.backend.checkpoint.gguf.projector import read_projector
from penstock.backend.checkpoint.hub import resolve_config, resolve_model
from penstock.backend.checkpoint.sources.gguf_files import find_projectors
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.forward_pass import DecoderPass
from penstock.backend.passes.vision.tower import VisionTower
from tests.backend.checkpoint.gguf.writer import GgufFile, byte_level_vocabulary, from_model, interleave
from tests.backend.passes.vision.test_pictures import MODELS, make_oracle
from tests.checkpoints import make_model

LAYERS = 4
_KEYS = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
OWN_KEYS: dict[str, dict[str, Any]] = {
    "smolvlm": {"clip.projector_type": "idefics3", "clip.vision.projector.scale_factor": 2},
    "gemma3": {"clip.projector_type": "gemma3", "clip.vision.projector.scale_factor": 2},
    "internvl": {
        "clip.vision.projector_type": "internvl",
        "clip.vision.projector.scale_factor": 2,
        "clip.use_gelu": True,
    },
    "pixtral": {"clip.projector_type": "pixtral", "clip.use_gelu": True},
    "mistral3": {"clip.projector_type": "pixtral", "clip.use_gelu": True, "clip.vision.spatial_merge_size": 2},
    "llava": {"clip.projector_type": "mlp", "clip.use_gelu": False},
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_directories, "cache_directory", lambda: tmp_path / "cache")


def projector_file(name: str, vision: dict[str, Any], tensors: dict[str, torch.Tensor]) -> GgufFile:
    """As llama.cpp's converter writes it, from a checkpoint's tensors."""
    sizes = {key: vision[own] for key, own in _KEYS.items()}
    sizes = {key: value[0] if isinstance(value, list) else value for key, value in sizes.items()}
    layers = LAYERS - (name == "llava")  # the last one's results are not used
    metadata = {f"clip.vision.{key}": value for key, value in sizes.items()} | {
        "clip.has_vision_encoder": True,
        "clip.vision.block_count": layers,
        "clip.vision.projection_dim": 64,
        "clip.vision.image_mean": [0.4, 0.5, 0.6],
        "clip.vision.image_std": [0.25, 0.3, 0.2],
        **OWN_KEYS[name],
    }
    file, names = GgufFile("clip", metadata), gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, LAYERS)
    for full, tensor in tensors.items():
        own = re.sub(r"vision_tower\.(?=embeddings|encoder|pre_|post_)", "vision_tower.vision_model.", full)
        if name == "internvl":
            own = "model." + re.sub(r"vision_model\.", "", own).removeprefix("model.")
            own = re.sub(r"model\.multi_modal_projector\.(layer_norm|linear_\d)", _internvl_part, own)
        if name == "gemma3":
            own = own.replace("projection_weight", "projection.weight")
        if "language_model" in own or "text_model" in own or "lm_head" in own or f"layers.{layers}." in own:
            continue
        if name == "llava" and own.startswith("multi_modal_projector"):
            found = own.replace("multi_modal_projector.linear_", "mm.").replace("mm.1", "mm.0")
        else:
            own = (
                own if own.endswith((".weight", ".bias")) or re.search("cls_token|class_emb", own) else f"{own}.weight"
            )
            found = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert found is not None, own
        if name in ("pixtral", "mistral3") and re.search(r"attn_[qk]\.weight", found):
            tensor = interleave(tensor, vision["num_attention_heads"])
        if name == "llava" and "post_ln" in found:
            continue
        if name in ("llava", "smolvlm"):  # as old converters name them
            found = re.sub(r"ffn_(?:up|down)", "ffn_down" if "ffn_up" in found else "ffn_up", found)
        content = tensor.float().numpy() + ("soft_emb_norm" in found)
        kind = gguf.GGMLQuantizationType.F32
        file.tensors[found] = np.ascontiguousarray(content, np.float32), kind
    return file


def _internvl_part(match: re.Match[str]) -> str:
    return "mlp1." + {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}[match[1]]


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    model = make_model("llama2", vocab_size=320)
    return from_model("llama", model, lambda _: "F32", byte_level_vocabulary(320)).write(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", OWN_KEYS)
def test_embeddings_are_those_of_the_safetensors_checkpoint(name: str, tmp_path: Path, text_model: Path) -> None:
    model = replace(MODELS[name], vision=MODELS[name].vision | {"num_hidden_layers": LAYERS})
    checkpoint = tmp_path / "checkpoint"
    make_oracle(model, checkpoint)
    oracle = VisionTower.load(checkpoint, PassOptions())
    tensors = load_file(checkpoint / "model.safetensors")
    projector_file(name, model.vision, tensors).write(tmp_path / "mmproj-model-f32.gguf")
    directory = resolve_model(str(text_model))
    tower = VisionTower.load(directory, PassOptions())
    assert oracle is not None
    assert tower is not None
    for tiles, height, width in model.sizes:
        pixels = np.random.default_rng(3).integers(0, 256, (tiles, 3, height, width), np.uint8)
        count = oracle.num_tokens(pixels.shape, (1, 1, 1))
        assert tower.num_tokens(pixels.shape, (1, 1, 1)) == count
        rows = tower.encode(pixels, (1, 1, 1), lambda: None)
        np.testing.assert_allclose(rows, oracle.encode(pixels, (1, 1, 1), lambda: None), atol=1e-5)


def test_other_projectors_are_refused_by_name(
    tmp_path: Path, text_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = GgufFile("clip", {"clip.projector_type": "resampler"}).write(tmp_path / "mmproj.gguf")
    with pytest.raises(
        StartupError, match=r"mmproj\.gguf: clip\.projector_type is 'resampler'; supported are idefics3"
    ):
        resolve_config(str(text_model), projector=path)
    assert VisionTower.load(resolve_model(str(text_model)), PassOptions()) is None
    assert "pictures are not taken" in caplog.text
    later = GgufFile("clip", {"clip.projector_type": "mlp"})
    later.tensors["model.image_newline"] = np.ones(64, np.float32), gguf.GGMLQuantizationType.F32
    with pytest.raises(StartupError, match=r"model\.image_newline is of LLaVA 1\.6"):
        read_projector(later.write(tmp_path / "later.gguf"), {"hidden_size": 64})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"--mmproj is .*; it belongs to a GGUF model"):
        resolve_config(str(tmp_path), projector=path)


def test_a_found_projector_with_broken_tensors_costs_the_pictures_and_a_named_one_the_start(
    tmp_path: Path, text_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tmp_path / "checkpoint"
    model = replace(MODELS["smolvlm"], vision=MODELS["smolvlm"].vision | {"num_hidden_layers": LAYERS})
    make_oracle(model, checkpoint)
    file = projector_file("smolvlm", model.vision, load_file(checkpoint / "model.safetensors"))
    del file.tensors["v.blk.1.ln1.bias"]
    file.write(tmp_path / "mmproj-model-f32.gguf")
    directory = resolve_model(str(text_model))
    found = DecoderPass.load(directory, PassOptions())
    assert found.picture_tower is None  # type: ignore[attr-defined]
    assert DecoderPass.describe(directory, PassOptions()).max_picture_bytes == 0
    found.close()
    warnings = [record.message for record in caplog.records if "pictures are not taken" in record.message]
    assert len(warnings) == 1
    assert "mmproj-model-f32.gguf: tensor v.blk.1.ln1.bias is missing" in warnings[0]
    with pytest.raises(StartupError, match=r"tensor v\.blk\.1\.ln1\.bias is missing"):
        VisionTower.load(directory, PassOptions(needs_pictures=True))


_SIZES = {
    "image_size": 384,
    "patch_size": 14,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "block_count": 2,
    "attention.head_count": 2,
    "projection_dim": 64,
    "projector.scale_factor": 3,
}


@pytest.mark.parametrize(
    ("projector", "key", "value", "message"),
    [
        ("idefics3", "projector.scale_factor", 2, r"scale_factor is 2; it must divide 27 patches a side"),
        ("internvl", "preproc_max_tiles", 1 << 20, r"preproc_max_tiles is 1048576; it is from 1 to 65536"),
        ("idefics3", "preproc_image_size", 1 << 31, r"preproc_image_size is 2147483648; it is from"),
        ("pixtral", "spatial_merge_size", 1 << 20, r"spatial_merge_size is 1048576; it is from"),
        ("gemma3", "block_count", 1 << 15, r"block_count is 32768; the file has more layers, or the limit is 1024"),
        ("gemma3", "block_count", 1, r"block_count is 1; the file has more layers"),
        ("gemma3", "patch_size", 385, r"patch_size 385; .* at most image_size, 384"),
        ("gemma3", "attention.layer_norm_epsilon", math.nan, r"epsilon is nan; it is between 0 and 1"),
        ("gemma3", "image_mean", [0.5, 0.5], r"image_mean is .*; expected 3 numbers"),
        ("mlp", "projection_dim", 768, r"its embeddings have 8 numbers; the model's embedding_length is 64"),
    ],
)
def test_sizes_in_the_metadata_are_checked(
    projector: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    numbers = {"clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3}
    sizes = {f"clip.vision.{name}": size for name, size in _SIZES.items()}
    file = GgufFile("clip", {"clip.projector_type": projector, **sizes, **numbers})
    for name in ("v.blk.1.ln1.bias", "mm.2.bias"):
        file.tensors[name] = np.zeros(64 if projector != "mlp" else 8, np.float32), gguf.GGMLQuantizationType.F32
    if projector != "mlp":
        read_projector(file.write(tmp_path / "good.gguf"), {"hidden_size": 64})
    file.metadata[f"clip.vision.{key}"] = value
    with pytest.raises(StartupError, match=message):
        read_projector(file.write(tmp_path / "bad.gguf"), {"hidden_size": 64})


def test_smallest_projector_that_is_not_quantised_is_preferred() -> None:
    sizes = {"model-Q4_K_M.gguf": 9, "mmproj-F32.gguf": 8, "mmproj-F16.gguf": 4, "mmproj-Q8_0.gguf": 2}
    assert find_projectors(sizes) == ["mmproj-F16.gguf", "mmproj-Q8_0.gguf", "mmproj-F32.gguf"]
