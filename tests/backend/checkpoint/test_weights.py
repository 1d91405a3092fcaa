"""Safetensors to canonical tensors: their values, dtypes, progress, and the memory that loading takes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from itertools import cycle
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.backend.checkpoint.config.tensors import NORM_FIELDS, expected_tensors
from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.files import progress as progress_module
from penstock.backend.checkpoint.files.layout import as_text_names
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.tools.random_model import ModelDims, write_random_model
from tests.backend.checkpoint.weight_files import INDEX, SHARDED, open_checkpoint, rewrite
from tests.checkpoints import make_checkpoint, make_model
from tests.presets import EXPERT_PRESETS, FUSED_EXPERT_PRESETS, PRESETS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


def stacked(state: dict[str, torch.Tensor], prefix: str, names: list[str], suffix: str) -> torch.Tensor | None:
    found = [state[key] for name in names if (key := f"{prefix}{name}.{suffix}") in state]
    return torch.cat(found) if found else None


LAYERS_DIFFER = ("gemma3n", "gemma3n-vision", "gemma4", "gemma4-e", "gemma4-moe", "gemma4-vision")
"""Their layers lack some of these tensors and have others; the decoder's tests compare their results."""


def stacked_norm(state: dict[str, torch.Tensor], name: str) -> torch.Tensor | None:
    found = [state[key] for suffix in ("weight", "bias") if (key := f"{name}.{suffix}") in state]
    return torch.cat(found) if found else None


@pytest.mark.parametrize(
    ("architecture", "sharding"),
    list(
        zip(
            (name for name in PRESETS if name not in (*EXPERT_PRESETS, *LAYERS_DIFFER)),
            cycle(({}, SHARDED)),
            strict=False,
        )
    ),
)
def test_canonical_tensors_equal_the_checkpoints(architecture: str, sharding: dict[str, str], tmp_path: Path) -> None:
    model_dir = make_checkpoint(architecture, tmp_path, **sharding)
    assert (model_dir / INDEX).exists() == bool(sharding)
    state = as_text_names(make_model(architecture).state_dict(), "the model")
    attention = [f"self_attn.{part}_proj" for part in ("q", "k", "v", "qkv")]
    layouts = {
        "qkv": [*attention, "linear_attn.in_proj_qkv", "linear_attn.in_proj_z"],
        "o": ["self_attn.o_proj", "linear_attn.out_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj", "mlp.c_fc"],
        "down": ["mlp.down_proj", "mlp.c_proj"],
    }
    config = read_decoder_config(model_dir)
    used = {spec.name for spec in expected_tensors(config)}
    text = {name for name in state if name.startswith(("model.embed", "model.layers.", "model.norm.", "lm_head."))}
    assert used == text - ({"lm_head.weight"} if config.tie_embeddings else set())
    norms = {field: getattr(config.names, field) for field in NORM_FIELDS}
    norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    with open_weights(model_dir, config) as weights:
        for i in range(config.num_layers):
            layer = weights.layer(i, Dtype.FP32)
            prefix = f"model.layers.{i}."
            expected = {name: stacked(state, prefix, parts, "weight") for name, parts in layouts.items()}
            expected |= {f"{name}_bias": stacked(state, prefix, parts, "bias") for name, parts in layouts.items()}
            expected |= {name: stacked_norm(state, f"{prefix}{part}") for name, part in norms.items()}
            for name, tensor in expected.items():
                torch.testing.assert_close(getattr(layer, name), tensor, rtol=0, atol=0)
        embedding, head = weights.embedding(Dtype.FP32), weights.lm_head(Dtype.FP32)
        assert torch.equal(embedding, state["model.embed_tokens.weight"])
        assert torch.equal(weights.final_norm(Dtype.FP32), stacked_norm(state, "model.norm"))
        assert head is None if config.tie_embeddings else torch.equal(head, state["lm_head.weight"])


@pytest.mark.parametrize("architecture", [name for name in EXPERT_PRESETS if name not in FUSED_EXPERT_PRESETS])
def test_experts_are_stacked_in_the_order_of_their_numbers(architecture: str, tmp_path: Path) -> None:
    """Everything in the file is used. tests/backend/passes/decoder compares the results with those of transformers, and
    formats/test_fused_experts.py is about gpt-oss."""
    model_dir = make_checkpoint(architecture, tmp_path)
    state = load_file(model_dir / "model.safetensors")
    config = read_decoder_config(model_dir)
    assert {spec.name for spec in expected_tensors(config)} == set(state)
    start, first, second, last = (
        ("model.layers.2.block_sparse_moe", "w1", "w3", "w2")
        if architecture == "mixtral"
        else ("model.layers.1.mlp" if architecture == "qwen2-moe" else "model.layers.2.mlp", *MLP_NAMES)
    )
    with open_weights(model_dir, config) as weights:
        layer = weights.layer(int(start.split(".")[2]), Dtype.FP32)
    assert config.experts is not None
    experts = [f"{start}.experts.{i}." for i in range(config.experts.count)]
    gate_up = [state[f"{expert}{part}.weight"] for expert in experts for part in (first, second)]
    assert layer.expert_gate_up is not None
    assert torch.equal(layer.expert_gate_up, torch.cat(gate_up))
    assert layer.expert_down is not None
    assert torch.equal(layer.expert_down, torch.cat([state[f"{expert}{last}.weight"] for expert in experts]))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("requested", [torch.float32, torch.bfloat16])
def test_weights_have_the_requested_dtype(stored: torch.dtype, requested: torch.dtype, tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path, dtype=stored)
    expected = make_model("llama2").lm_head.weight.detach().to(stored).to(requested)
    with open_checkpoint(model_dir) as weights:
        head = weights.lm_head(Dtype.of(requested))
        assert head is not None
        torch.testing.assert_close(head, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("requested", "declared", "stored", "chosen"),
    [
        ("auto", "bfloat16", torch.float32, torch.bfloat16),
        ("auto", "float16", torch.float16, torch.bfloat16),
        ("auto", None, torch.float32, torch.float32),
        ("auto", None, torch.float16, torch.bfloat16),
        ("fp32", "bfloat16", torch.bfloat16, torch.float32),
        ("bf16", "float32", torch.float32, torch.bfloat16),
    ],
)
def test_auto_dtype_is_the_declared_one_or_else_the_stored_one(
    requested: str, declared: str | None, stored: torch.dtype, chosen: torch.dtype, tmp_path: Path
) -> None:
    model_dir = make_checkpoint("llama2", tmp_path, dtype=stored)
    values = json.loads((model_dir / "config.json").read_text()) | {"dtype": declared}
    (model_dir / "config.json").write_text(json.dumps(values))
    with open_checkpoint(model_dir) as weights:
        assert weights.choose_dtype(requested) is Dtype.of(chosen)
        with pytest.raises(StartupError, match="dtype is 'int3'; it must be auto, bf16 or fp32"):
            weights.choose_dtype("int3")


def test_progress_counts_every_byte_once_and_is_closed_once(tmp_path: Path) -> None:
    class Recorder:
        def __init__(self, total_bytes: int) -> None:
            self.total_bytes, self.done_bytes, self.closed = total_bytes, 0, 0

        def advance(self, num_bytes: int) -> None:
            self.done_bytes += num_bytes

        def close(self) -> None:
            self.closed += 1

    recorders: list[Recorder] = []

    def make_recorder(total_bytes: int) -> Recorder:
        recorders.append(Recorder(total_bytes))
        return recorders[0]

    model_dir = make_checkpoint("qwen3", tmp_path)
    config = read_decoder_config(model_dir)
    with open_weights(model_dir, config, make_recorder) as weights:
        weights.embedding(Dtype.BF16)
        for i in range(config.num_layers):
            weights.layer(i, Dtype.BF16)
        weights.final_norm(Dtype.BF16)
        assert recorders[0].done_bytes == recorders[0].total_bytes == weights.stored_bytes
    weights.close()
    assert recorders[0].closed == 1


def test_progress_without_a_terminal_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "LOG_INTERVAL_S", 0.0)
    with caplog.at_level(logging.INFO, "penstock.backend"):
        progress = progress_module.make_progress(4_000_000)
        progress.advance(1_000_000)
        progress.close()
    assert caplog.messages[0] == "Loading weights: 1.00 MB of 4.00 MB"
    assert caplog.messages[1].startswith("Loaded 1.00 MB of weights in ")


def test_progress_on_a_terminal_is_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = progress_module.make_progress(4_000_000)
    progress.advance(4_000_000)
    progress.close()
    assert isinstance(progress, progress_module.BarProgress)
    assert "Loading weights" in capsys.readouterr().err


MEASURE_PEAK = """
import re, sys
from pathlib import Path
import torch
from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.files.layout import as_text_names
from penstock.backend.checkpoint.config.tensors import NORM_FIELDS, expected_tensors
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype

def read_bytes(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

model_dir = Path(sys.argv[1])
config = read_decoder_config(model_dir)
torch.ones(1 << 20, dtype=torch.bfloat16).float()  # torch's own threads and tables
for dtype in (Dtype.BF16, Dtype.FP32):
    before = read_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    with open_weights(model_dir, config) as weights:
        kept = [weights.embedding(dtype), weights.final_norm(dtype)]
        kept += [weights.layer(i, dtype) for i in range(config.num_layers)]
        kept += [weights.lm_head(dtype)]
        loaded_bytes = weights.stored_bytes * dtype.itemsize // 2
    print(read_bytes("VmHWM") - before, loaded_bytes)
    del kept
"""


def test_loading_needs_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    write_random_model(model_dir, ModelDims(tie=False, layers=8), max_shard_bytes=60_000_000)
    child = subprocess.run(
        [sys.executable, "-c", MEASURE_PEAK, str(model_dir)], capture_output=True, text=True, check=True
    )
    for line in child.stdout.splitlines():
        peak_bytes, loaded_bytes = map(int, line.split())
        assert loaded_bytes > 180_000_000
        assert peak_bytes < 1.15 * loaded_bytes
    assert len(child.stdout.splitlines()) == 2


def test_text_model_of_a_larger_one_keeps_its_own_names() -> None:
    stored = ("language_model.model.norm.weight", "language_model.lm_head.weight", "model.language_model.layers.0.x")
    names = as_text_names(dict.fromkeys((*stored, "vision_tower.norm.weight"), 0), "it")
    assert list(names) == ["model.norm.weight", "lm_head.weight", "model.layers.0.x", "vision_tower.norm.weight"]


@pytest.mark.parametrize("rename", [lambda name: f"_orig_mod.{name}", lambda name: name.removeprefix("model.")])
def test_other_prefixes_mean_the_same_tensors(rename: Callable[[str], str], tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path)
    path = model_dir / "model.safetensors"
    with open_checkpoint(model_dir) as weights:
        expected = [weights.final_norm(Dtype.FP32), weights.lm_head(Dtype.FP32)]
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path)
    with open_checkpoint(model_dir) as weights:
        found = [weights.final_norm(Dtype.FP32), weights.lm_head(Dtype.FP32)]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))  # type: ignore[arg-type]


def test_shards_need_no_index(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path, **SHARDED)
    with open_checkpoint(model_dir) as weights:
        expected = weights.layer(2, Dtype.FP32).qkv
    (model_dir / INDEX).unlink()
    with open_checkpoint(model_dir) as weights:
        assert torch.equal(weights.layer(2, Dtype.FP32).qkv, expected)  # type: ignore[arg-type]
    shard, other = sorted(model_dir.glob("model-*.safetensors"))[1:3]
    name = next(iter(load_file(other)))
    rewrite(shard, {name: torch.zeros(1)})
    with pytest.raises(StartupError, match=rf"{other}: tensor '{name}' is in {shard.name} as well"):
        open_checkpoint(model_dir)
    shard.unlink()
    with pytest.raises(StartupError, match=rf"{shard} does not exist, and {INDEX} neither"):
        open_checkpoint(model_dir)


@pytest.mark.parametrize(
    ("rows", "token_ids", "vocab_size"),
    [(256, 256, 256), (250, 240, 250), (320, 300, 300), (320, 200, 256), (320, None, 256), (320, 400, 320)],
)
def test_resized_vocabulary_has_the_rows_that_can_be_sampled(
    rows: int, token_ids: int | None, vocab_size: int, tmp_path: Path
) -> None:
    """vocab_size in config.json is 256."""
    model_dir = make_checkpoint("llama2", tmp_path)
    tables = {name: torch.randn(rows, 64) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    rewrite(model_dir / "model.safetensors", dict(tables))
    if token_ids is not None:
        tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": token_ids - 1}]}
        (model_dir / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = read_decoder_config(model_dir)
    assert config.vocab_size == vocab_size
    with open_weights(model_dir, config) as weights:
        assert torch.equal(weights.embedding(Dtype.FP32), tables["model.embed_tokens.weight"][:vocab_size])  # type: ignore[arg-type]
        assert torch.equal(weights.lm_head(Dtype.FP32), tables["lm_head.weight"][:vocab_size])  # type: ignore[arg-type]


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(StartupError, match=r"it: tensor 'model.norm.weight' is another 'model.norm.weight'"):
        as_text_names({"language_model.model.norm.weight": 0, "model.norm.weight": 0}, "it")
