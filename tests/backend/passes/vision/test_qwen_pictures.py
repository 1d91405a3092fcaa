"""Qwen's pictures against transformers: positions on three axes, and features that the first layers add."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from penstock.backend.engine.pictures.desk import PictureDesk
from penstock.backend.forward_pass import PassOptions
from penstock.backend.forward_pass.extensions import PICTURE_CACHE_BYTES
from penstock.backend.passes.decoder.forward_pass import DecoderPass
from penstock.backend.passes.vision import qwen
from penstock.backend.passes.vision.families import FAMILIES
from penstock.backend.passes.vision.pixels import Normalization
from penstock.backend.passes.vision.tower import VisionTower
from penstock.backend.sequences.pictures import PictureCache, SequencePictures
from penstock.shm.messages import Finish, Picture, Sampling, picture_digest, picture_token_ids
from tests.backend.engine.test_pictures import Pixels, SteppedTower
from tests.backend.engine.test_speculation import Eager
from tests.backend.harness import Bench
from tests.presets import COMMON, PRESETS

IMAGE_TOKEN, NUM_TOKENS, PATCH_VALUES = 250, 6, 3 * 2 * 4 * 4
MEAN, STD = (0.4, 0.5, 0.6), (0.25, 0.3, 0.2)
_TOWER = {"num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN3 = _TOWER | {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2-vl": _TOWER | {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2.5-vl": _TOWER
    | {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3-vl": _QWEN3 | {"deepstack_visual_indexes": [0, 2]},
    "qwen3-vl-moe": _QWEN3 | {"deepstack_visual_indexes": [1]},
    "qwen3.5-vision": _QWEN3,
    "qwen3.5-moe-vision": _QWEN3,
}
GRIDS = [(1, 4, 6), (1, 10, 2), (1, 2, 2)]


def make_config(name: str, tower: dict[str, Any] | None = None, **more_settings: Any) -> Any:
    preset = PRESETS[name]
    assert preset.text_config is not None
    text = {key: value for key, value in (COMMON | preset.settings).items() if key != "tie_word_embeddings"}
    if name.startswith("qwen3.5"):
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [3, 3, 2]}
    text |= more_settings
    return getattr(transformers, preset.config)(
        text_config=getattr(transformers, preset.text_config)(**text).to_dict(),
        vision_config=TOWERS[name] | (tower or {}),
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    )


def make_oracle(name: str, out_dir: Path, tower: dict[str, Any] | None = None, **more_settings: Any) -> Any:
    """A random model, saved with the processor's settings. more_settings: of its text model; tower: of the tower."""
    torch.manual_seed(5)
    oracle = getattr(transformers, PRESETS[name].model)(make_config(name, tower, **more_settings))
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * noise if "norm" in name and name.endswith("weight") else 0.15 * noise)
    oracle.eval().save_pretrained(out_dir)
    (out_dir / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": MEAN, "image_std": STD, "min_pixels": 64, "max_pixels": 64 * 40})
    )
    return oracle


def oracle_inputs(tokens: list[int], pixels: list[NDArray[np.uint8]]) -> dict[str, Any]:
    mean, std = (torch.tensor(values).reshape(3, 1) for values in (MEAN, STD))
    patches = [
        ((torch.from_numpy(each).float().view(len(each), 3, -1) / 255 - mean) / std).flatten(1) for each in pixels
    ]
    ids = torch.tensor([tokens])
    return {
        "input_ids": ids,
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor(GRIDS[: len(pixels)]),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
    }


class Prompt:
    """Text, and pictures of all grids between."""

    def __init__(self, memory: Pixels) -> None:
        generator = np.random.default_rng(3)
        self.tokens, self.words = [3, 7, 11], [3, 7, 11]
        self.pixels = [generator.integers(0, 256, (r * c, PATCH_VALUES), np.uint8) for _, r, c in GRIDS]
        pictures = []
        for index, (pixels, grid) in enumerate(zip(self.pixels, GRIDS, strict=True)):
            count = len(pixels) // 4
            digest = picture_digest(pixels.shape, grid, pixels.tobytes())
            spans = ((len(self.tokens), count),)
            pictures.append(Picture(spans, digest, pixels.shape, grid, memory.store(pixels.tobytes())))
            self.tokens += [*picture_token_ids(digest, count), 20 + index, 21, 20]
            self.words += [*[IMAGE_TOKEN] * count, 20 + index, 21, 20]
        self.pictures = tuple(pictures)


class QwenBench(Bench):
    def __init__(self, directory: Path, load: Callable[[Path, PassOptions], Any] = DecoderPass.load, **options: Any):
        self.memory = Pixels()
        passed = PassOptions(dtype="fp32", max_running=4, max_batch_tokens=16)
        self.described = DecoderPass.describe(directory, passed)
        self.served = load(directory, passed)
        self.tower = SteppedTower(self.served.picture_tower)
        self.served._spec = replace(self.served.spec, max_picture_bytes=self.described.max_picture_bytes)
        row_bytes = 4 * 64 * (1 + self.served.spec.picture_layers)
        super().__init__(
            forward_pass=self.served,
            max_running=4,
            vocab_size=self.served.spec.vocab_size,
            make_pictures=lambda scheduler, delivery: PictureDesk(
                self.tower, PictureCache(1 << 20), row_bytes, scheduler.pictures, delivery
            ),
            **options,
        )

    def ask(self, prompt: Prompt, request_id: int) -> None:
        sampling = Sampling(temperature=0.0, num_logprobs=5)
        self.submit(prompt.tokens, NUM_TOKENS, request_id=request_id, pictures=prompt.pictures, sampling=sampling)
        self.link.arrivals[-1] = replace(self.link.arrivals[-1], read_pixels=self.memory.read)

    def run(self) -> None:
        while not self.is_idle:
            self.turn()
            self.tower.finish()

    def close(self) -> None:
        self.tower.thread.close()
        super().close()
        self.served.close()


def check(bench: QwenBench, request_id: int, oracle: Any, prompt: Prompt) -> None:
    received = bench.received(request_id)
    assert received.finishes == [Finish.LENGTH], received.failure
    with torch.inference_mode():
        logits = oracle(**oracle_inputs([*prompt.words, *received.token_ids[:-1]], prompt.pixels)).logits[0]
    rows = torch.log_softmax(logits[-len(received.token_ids) :].float(), -1)
    for token, entry, expected in zip(received.token_ids, received.logprobs, rows, strict=True):
        assert token == int(expected.argmax())
        assert entry is not None
        np.testing.assert_allclose(entry.top_logprobs, expected[list(entry.top_ids)], atol=2e-4)


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize(("chunk", "is_native"), [(1, True), (7, True), (16, False)])
def test_log_probabilities_are_those_of_transformers(
    name: str, chunk: int, is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        for module in ("decoder.cpu_pass", "vision.native_blocks"):
            monkeypatch.setattr(f"penstock.backend.passes.{module}.load_kernels", lambda *_: None)
    oracle = make_oracle(name, tmp_path)
    bench = QwenBench(tmp_path, max_batch_tokens=chunk)
    prompt = Prompt(bench.memory)
    bench.submit([9, 8, 7, 6], 30, request_id=1)
    bench.ask(prompt, 0)
    bench.run()
    check(bench, 0, oracle, prompt)
    bench.ask(prompt, 2)
    bench.run()
    check(bench, 2, oracle, prompt)
    bench.close()


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5-vision"])
def test_positions_are_those_of_transformers_for_any_layout(name: str) -> None:
    chance, config = random.Random(name), make_config(name)
    with torch.device("meta"):
        model = getattr(transformers, PRESETS[name].model)(config).model
    side = config.vision_config.spatial_merge_size
    for _ in range(60):
        types, grids, pictures = [0] * chance.randrange(4), [], []
        for index in range(chance.randrange(1, 5)):
            rows, columns = chance.randrange(1, 9), chance.randrange(1, 9)
            grids.append((1, side * rows, side * columns))
            count = rows * columns
            pictures.append(Picture(((len(types), count),), bytes([index]) * 32, (1, 1), grids[-1]))
            types += [*[1] * count, *[0] * chance.randrange(1, 6)]  # text ends each picture
        ids = torch.tensor([types])
        expected, _ = model.get_rope_index(
            torch.where(ids > 0, IMAGE_TOKEN, ids), mm_token_type_ids=ids, image_grid_thw=torch.tensor(grids)
        )
        placed = SequencePictures(tuple(pictures), b"", PictureCache(1))
        first = chance.randrange(len(types))
        np.testing.assert_array_equal(
            placed.rope_positions(first, len(types)), expected[:, 0, first:].T.numpy().astype(np.int32)
        )


def test_preemption_drafts_and_shared_pages_keep_positions(tmp_path: Path) -> None:
    """Few pages: sequences take them from each other, and begin again behind pages of the same pictures."""
    oracle = make_oracle("qwen3-vl", tmp_path)
    bench = QwenBench(tmp_path, max_batch_tokens=16, num_pages=26, drafting=Eager())
    prompt = Prompt(bench.memory)
    for request_id in range(3):
        bench.submit([request_id, 8, 7, 6], 60, request_id=10 + request_id)
        bench.ask(prompt, request_id)
    bench.run()
    for request_id in range(3):
        check(bench, request_id, oracle, prompt)
    assert any(bench.received(request_id).num_preemptions for request_id in (0, 1, 2, 10, 11, 12))
    drafted = [batch for batch in bench.executor.batches if batch.drafts is not None]
    assert any(batch.rope_positions is not None for batch in drafted)
    for request_id in (3, 4):
        bench.ask(prompt, request_id)
        bench.run()
        check(bench, request_id, oracle, prompt)
    started = bench.received(4).started
    assert started is not None
    assert started.cached_tokens > 12
    bench.close()


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((48, 96), (2, 4, 6)),
        ((24, 96), (1, 3, 8)),
        ((24, 96), (1, 6, 6)),
        ((24, 192), (1, 4, 6)),
        ((24, 95), (1, 4, 6)),
    ],
)
def test_pixels_that_do_not_fit_the_grid_are_refused(shape: tuple[int, ...], grid: tuple[int, int, int]) -> None:
    vision = SimpleNamespace(spatial_merge_size=2, temporal_patch_size=2, patch_size=[4, 4])
    model: Any = torch.nn.Linear(1, 1)
    text = SimpleNamespace(hidden_size=64)
    model.config = SimpleNamespace(vision_config=vision, get_text_config=lambda **_: text)
    normalization = Normalization.read({}, FAMILIES["Qwen3VLForConditionalGeneration"])
    tower = VisionTower(model, FAMILIES["Qwen3VLForConditionalGeneration"], normalization, 1 << 20)
    assert tower.num_tokens((24, 96), (1, 4, 6)) == 6
    with pytest.raises(ValueError, match=r"multiples of 2|takes \[tiles"):
        tower.num_tokens(shape, grid)


def test_no_picture_exceeds_what_is_kept_of_embeddings() -> None:
    config = transformers.Qwen3VLConfig()
    num_bytes, num_patches = qwen.limits(config, {"size": {"longest_edge": 1 << 24}})
    row_bytes = 4 * config.text_config.hidden_size * 4
    assert (num_patches // 4 + 1) * row_bytes > PICTURE_CACHE_BYTES >= num_patches // 4 * row_bytes
    assert num_bytes == num_patches * 3 * 2 * 16**2
    assert qwen.limits(config, {"max_pixels": 64 * 32**2})[1] == 256
