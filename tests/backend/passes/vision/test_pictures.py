"""Tokens and log probabilities of prompts with pictures, against transformers: through the engine, in chunks, between
rows of text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from transformers.models.gemma4.image_processing_pil_gemma4 import convert_image_to_patches, pad_along_first_dim

from penstock.backend.engine.pictures.desk import PictureDesk
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.forward_pass import DecoderPass
from penstock.backend.passes.vision.checkpoint import empty_model, read_config
from penstock.backend.sequences.pictures import PictureCache
from penstock.shm.messages import Finish, Picture, Sampling, picture_digest, picture_token_ids
from tests.backend.engine.test_pictures import Pixels, SteppedTower
from tests.backend.harness import Bench
from tests.presets import COMMON, PRESETS

IMAGE_TOKEN, NUM_TOKENS = 250, 6
MEAN, STD = (0.4, 0.5, 0.6), (0.25, 0.3, 0.2)
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_ALTERNATING = {
    "head_dim": 32,
    "sliding_window": 10,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "standardize": True,
}
_CLIP = _SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 32}
_PIXTRAL = _SIGLIP | {"model_type": "pixtral", "head_dim": 16, "image_size": 64}


@dataclass
class Model:
    kind: str
    text: str
    vision: dict[str, Any]
    sizes: list[tuple[int, int, int]]
    """(tiles, height, width) of pictures in one prompt."""
    settings: dict[str, Any] = field(default_factory=dict)
    originals: list[tuple[int, int]] = field(default_factory=list)
    """LLaVA-OneVision's heights and widths of pictures before they were cut into tiles."""
    text_settings: dict[str, Any] = field(default_factory=lambda: {"sliding_window": None})


MODELS = {
    "smolvlm": Model("SmolVLM", "llama", _SIGLIP, [(1, 32, 32), (5, 32, 32)], {"scale_factor": 2}),
    "idefics3": Model("Idefics3", "llama", _SIGLIP, [(3, 32, 32)], {"scale_factor": 2}),
    "internvl": Model(
        "InternVL",
        "qwen2",
        _SIGLIP | {"image_size": [32, 32], "patch_size": [8, 8]},
        [(3, 32, 32), (1, 32, 32)],
        {"downsample_ratio": 0.5, "vision_feature_layer": -1},
    ),
    "llava": Model("Llava", "llama", _CLIP, [(1, 32, 32), (1, 32, 32)], {"vision_feature_layer": -2}),
    "pixtral": Model(
        "Llava",
        "mistral",
        _PIXTRAL,
        [(1, 24, 40)],
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "mistral3": Model("Mistral3", "mistral", _PIXTRAL, [(1, 32, 64), (1, 48, 16)], {"spatial_merge_size": 2}),
    "onevision": Model(
        "LlavaOnevision",
        "qwen2",
        _SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
        [(5, 32, 32)],
        {"image_grid_pinpoints": [[32, 32], [64, 64]]},
        [(50, 37)],
    ),
    "gemma3": Model(
        "Gemma3",
        "gemma3_text",
        _SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False, "patch_size": 4},
        [(1, 32, 32), (1, 32, 32)],
        {"mm_tokens_per_image": 16},
        text_settings=_ALTERNATING,
    ),
    "gemma4": Model(
        "Gemma4",
        "gemma4_text",
        _GEMMA4_VISION,
        [(1, 48, 36), (1, 24, 96)],
        {"audio_config": None},
        text_settings=PRESETS["gemma4"].settings | _ALTERNATING | {"use_bidirectional_attention": "vision"},
    ),
    "gemma4-e": Model(
        "Gemma4",
        "gemma4_text",
        _GEMMA4_VISION,
        [(1, 48, 36)],
        {"audio_config": None},
        text_settings=PRESETS["gemma4-e"].settings,
    ),
    "onevision-several": Model(
        "LlavaOnevision",
        "qwen2",
        _SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
        [(1, 32, 32), (1, 32, 32)],
        {"image_grid_pinpoints": [[32, 32], [64, 64]]},
        [(50, 37), (20, 90)],
    ),
}


def make_oracle(model: Model, out_dir: Path) -> Any:
    """A random model, saved with the processor's settings."""
    text = {key: value for key, value in COMMON.items() if key != "tie_word_embeddings"} | {"model_type": model.text}
    config = getattr(transformers, f"{model.kind}Config")(
        text_config=text | model.text_settings,
        vision_config=dict(model.vision),
        tie_word_embeddings=False,
        **{"image_token_id": IMAGE_TOKEN} | model.settings,
    )
    config.image_token_index = config.image_token_id = IMAGE_TOKEN
    torch.manual_seed(5)
    oracle = getattr(transformers, f"{model.kind}ForConditionalGeneration")(config)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * noise if "norm" in name and name.endswith("weight") else 0.15 * noise)
    oracle.eval().save_pretrained(out_dir)
    (out_dir / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
    return oracle


def gemma4_inputs(tiles: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the image processor pads them."""
    values, places = [], []
    for tile in tiles:
        patches = convert_image_to_patches(tile[0].numpy(), 4)
        columns = tile.shape[3] // 4
        own = np.array([(index % columns, index // columns) for index in range(len(patches))])
        padded = pad_along_first_dim(patches, own, 180)
        values.append(padded[0])
        places.append(padded[1])
    return {
        "pixel_values": torch.from_numpy(np.stack(values)),
        "image_position_ids": torch.from_numpy(np.stack(places)),
    }


def oracle_logprobs(oracle: Any, model: Model, tokens: list[int], pixels: list[NDArray[np.uint8]]) -> torch.Tensor:
    """[vocabulary] after the tokens."""
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
    tiles = [(torch.from_numpy(each).float() / 255 - mean) / std for each in pixels]
    sizes = torch.tensor(model.originals or [size[1:] for size in model.sizes])
    inputs: dict[str, Any] = {}
    match model.kind:
        case "SmolVLM" | "Idefics3":
            inputs["pixel_values"] = torch.cat(tiles)[None]
        case "InternVL":
            inputs["pixel_values"] = torch.cat(tiles)
        case "Gemma3":
            inputs["pixel_values"] = torch.cat(tiles)
            inputs["token_type_ids"] = (torch.tensor([tokens]) == IMAGE_TOKEN).int()
        case "Gemma4":
            inputs = gemma4_inputs(tiles) | {"mm_token_type_ids": (torch.tensor([tokens]) == IMAGE_TOKEN).int()}
        case "LlavaOnevision":
            inputs["pixel_values"], inputs["image_sizes"] = torch.stack(tiles), sizes
            inputs["batch_num_images"] = torch.tensor([len(tiles)])
        case _:
            padded = torch.zeros(len(tiles), 3, *sizes.max(0).values.tolist())
            for place, tile in zip(padded, tiles, strict=True):
                place[:, : tile.shape[2], : tile.shape[3]] = tile[0]
            inputs["pixel_values"] = padded
            if model.vision.get("model_type") == "pixtral":
                inputs["image_sizes"] = sizes
    with torch.inference_mode():
        logits = oracle(input_ids=torch.tensor([tokens]), **inputs).logits[0, -1]
    return torch.log_softmax(logits.float(), -1)


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    oracle = make_oracle(model, tmp_path)
    options = PassOptions(dtype="fp32", max_running=4, max_batch_tokens=20)
    described = DecoderPass.describe(tmp_path, options)
    served: Any = DecoderPass.load(tmp_path, options)
    tower = served.picture_tower
    assert described.max_picture_bytes == tower.max_picture_bytes >= max(3 * t * h * w for t, h, w in model.sizes)
    num_values = sum(parameter.numel() for parameter in empty_model(read_config(tmp_path)).parameters())
    assert described.weight_bytes == served.spec.weight_bytes + 4 * num_values
    served._spec = replace(served.spec, max_picture_bytes=tower.max_picture_bytes)
    check_answers(served, model, oracle, sees_whole=described.whole_picture_tokens > 0)


def check_answers(served: Any, model: Model, oracle: Any, *, sees_whole: bool, **options: Any) -> None:
    """Of one prompt with pictures of all sizes, beside text."""
    tower = served.picture_tower
    stepped, memory = SteppedTower(tower), Pixels()
    bench = Bench(
        forward_pass=served,
        num_pages=128,
        max_running=4,
        max_batch_tokens=20,
        vocab_size=served.spec.vocab_size,
        make_pictures=lambda scheduler, delivery: PictureDesk(
            stepped,
            PictureCache(1 << 20),
            4 * 64,
            scheduler.pictures,
            delivery,
            sees_whole=sees_whole,
        ),
        **options,
    )
    generator = np.random.default_rng(3)
    pixels = [generator.integers(0, 256, (tiles, 3, height, width), np.uint8) for tiles, height, width in model.sizes]
    tokens, as_words, pictures = [3, 7, 11], [3, 7, 11], []
    for index, each in enumerate(pixels):
        grid = (1, *model.originals[index]) if model.originals else (1, 1, 1)
        count = tower.num_tokens(each.shape, grid)
        digest = picture_digest(each.shape, grid, each.tobytes())
        pictures.append(Picture(((len(tokens), count),), digest, each.shape, grid, memory.store(each.tobytes())))
        tokens += [*picture_token_ids(digest, count), 20 + index]
        as_words += [*[IMAGE_TOKEN] * count, 20 + index]
    sampling = Sampling(temperature=0.0, num_logprobs=5)
    bench.submit([9, 8, 7, 6], 20, request_id=1)
    bench.submit(tokens, NUM_TOKENS, pictures=tuple(pictures), sampling=sampling)
    bench.link.arrivals[-1] = replace(bench.link.arrivals[-1], read_pixels=memory.read)
    while not bench.is_idle:
        bench.turn()
        stepped.finish()
    assert bench.received().finishes == [Finish.LENGTH], bench.received().failure
    for token, entry in zip(bench.received().token_ids, bench.received().logprobs, strict=True):
        expected = oracle_logprobs(oracle, model, as_words, pixels)
        assert token == int(expected.argmax())
        assert entry is not None
        np.testing.assert_allclose(entry.top_logprobs, expected[list(entry.top_ids)], atol=2e-4)
        as_words.append(token)
    stepped.thread.close()
    bench.close()
    served.close()


def test_missing_tensor_of_the_tower_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_oracle(MODELS["smolvlm"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.vision_model.post_layernorm.bias"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupError, match=r"tensor model\.vision_model\.post_layernorm\.bias is missing"):
        DecoderPass.load(tmp_path, PassOptions())
