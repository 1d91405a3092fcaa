"""Safetensors → canonical tensors: their values, their faults, and the memory that loading takes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from penstock.backend.checkpoint import progress as progress_module
from penstock.backend.checkpoint import safetensors_file
from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.safetensors_file import SafetensorsFile
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.errors import StartupError
from penstock.tools.random_model import ModelDims, write_random_model
from tests.checkpoints import PRESETS, make_checkpoint, make_model

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backend.checkpoint.weights import DecoderWeights

SHARDED = {"max_shard_size": "60KB"}
INDEX = "model.safetensors.index.json"


def open_checkpoint(model_dir: Path) -> DecoderWeights:
    return open_weights(model_dir, read_decoder_config(model_dir))


def refusal(model_dir: Path) -> str:
    with pytest.raises(StartupError) as refused:
        open_checkpoint(model_dir)
    return str(refused.value)


def rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replaces tensors of a safetensors file; None removes."""
    tensors: dict[str, Any] = {name: tensor.clone() for name, tensor in load_file(path).items()} | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def stacked(state: dict[str, torch.Tensor], prefix: str, names: list[str], suffix: str) -> torch.Tensor | None:
    found = [state[key] for name in names if (key := f"{prefix}{name}.{suffix}") in state]
    return torch.cat(found) if found else None


@pytest.mark.parametrize("sharding", [{}, SHARDED], ids=["single", "sharded"])
@pytest.mark.parametrize("architecture", PRESETS)
def test_canonical_tensors_are_the_checkpoints(architecture: str, sharding: dict[str, str], tmp_path: Path) -> None:
    model_dir = make_checkpoint(architecture, tmp_path, **sharding)
    assert (model_dir / INDEX).exists() == bool(sharding)
    state = make_model(architecture).state_dict()
    layouts = {
        "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"],
        "o": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"],
        "down": ["mlp.down_proj"],
    }
    norms = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    config = read_decoder_config(model_dir)
    with open_weights(model_dir, config) as weights:
        for i in range(config.num_layers):
            layer = weights.layer(i, torch.float32)
            prefix = f"model.layers.{i}."
            expected = {name: stacked(state, prefix, parts, "weight") for name, parts in layouts.items()}
            expected |= {f"{name}_bias": stacked(state, prefix, parts, "bias") for name, parts in layouts.items()}
            expected |= {name: stacked(state, prefix, [part], "weight") for name, part in norms.items()}
            for name, tensor in expected.items():
                torch.testing.assert_close(getattr(layer, name), tensor, rtol=0, atol=0)
        embedding, head = weights.embedding(torch.float32), weights.lm_head(torch.float32)
        assert torch.equal(embedding, state["model.embed_tokens.weight"])
        assert torch.equal(weights.final_norm(torch.float32), state["model.norm.weight"])
        assert head is None if config.tie_embeddings else torch.equal(head, state["lm_head.weight"])


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_weights_come_in_the_dtype_asked_for(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path, dtype=stored)
    expected = make_model("llama2").lm_head.weight.detach().to(stored).to(wanted)
    with open_checkpoint(model_dir) as weights:
        head = weights.lm_head(wanted)
        assert head is not None
        torch.testing.assert_close(head, expected, rtol=0, atol=0)


def test_a_tensor_of_many_windows_at_any_offset_is_copied_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "WINDOW_BYTES", 10_002)
    tensor = torch.arange(40_003, dtype=torch.int32).to(torch.float16)
    data = tensor.numpy().tobytes()
    header = json.dumps({"t": {"dtype": "F16", "shape": [40_003], "data_offsets": [3, 3 + len(data)]}}).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0" + data)
    file, copied_bytes, target = SafetensorsFile(path), [], torch.empty(40_003)
    file.copy(file.tensors["t"], target, copied_bytes.append)
    file.close()
    assert torch.equal(target, tensor.float())
    assert sum(copied_bytes) == len(data)
    assert len(copied_bytes) == 8


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
def test_auto_is_what_the_config_declares_else_what_is_stored(
    requested: str, declared: str | None, stored: torch.dtype, chosen: torch.dtype, tmp_path: Path
) -> None:
    model_dir = make_checkpoint("llama2", tmp_path, dtype=stored)
    values = json.loads((model_dir / "config.json").read_text()) | {"dtype": declared}
    (model_dir / "config.json").write_text(json.dumps(values))
    with open_checkpoint(model_dir) as weights:
        assert weights.choose_dtype(requested) is chosen
        with pytest.raises(StartupError, match="dtype is 'int3'; it must be auto, bf16 or fp32"):
            weights.choose_dtype("int3")


def test_tensors_that_are_not_needed_are_ignored(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama-tied", tmp_path)
    extra = {"lm_head.weight": torch.zeros(3), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    rewrite(model_dir / "model.safetensors", extra | {"steps": torch.zeros(2, dtype=torch.int64)})
    with open_checkpoint(model_dir) as weights:
        assert weights.lm_head(torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mapped_embedding_is_the_embedding_and_outlives_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama-tied", tmp_path, dtype=dtype)
    with open_checkpoint(model_dir) as weights:
        mapped, copied = weights.mapped_embedding(), weights.embedding(dtype)
    (model_dir / "model.safetensors").unlink()
    torch.testing.assert_close(mapped, copied, rtol=0, atol=0)


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
        weights.embedding(torch.bfloat16)
        for i in range(config.num_layers):
            weights.layer(i, torch.bfloat16)
        weights.final_norm(torch.bfloat16)
        assert recorders[0].done_bytes == recorders[0].total_bytes == weights.stored_bytes
    weights.close()
    assert recorders[0].closed == 1


def test_without_a_terminal_progress_is_lines_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "LOG_INTERVAL_S", 0.0)
    with caplog.at_level(logging.INFO, "penstock.backend.checkpoint.progress"):
        progress = progress_module.make_progress(4_000_000)
        progress.advance(1_000_000)
        progress.close()
    assert caplog.messages[0] == "Loading weights: 1.00 MB of 4.00 MB"
    assert caplog.messages[1].startswith("Loaded 1.00 MB of weights in ")


def test_on_a_terminal_progress_is_a_bar_on_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = progress_module.make_progress(4_000_000)
    progress.advance(4_000_000)
    progress.close()
    assert isinstance(progress, progress_module.BarProgress)
    assert "Loading weights" in capsys.readouterr().err


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path)
    (model_dir / "model.safetensors").unlink()
    assert f"{model_dir} has neither model.safetensors nor {INDEX}" in refusal(model_dir)


def test_a_missing_shard_is_refused_by_its_name(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path, **SHARDED)
    shard = sorted(model_dir.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"{shard} cannot be opened: No such file or directory" in refusal(model_dir)


@pytest.mark.parametrize("architecture", ["llama2", "qwen2", "qwen3", "phi3"])
def test_any_missing_tensor_is_refused_by_its_name_shape_and_place(architecture: str, tmp_path: Path) -> None:
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


def test_a_tensor_that_its_shard_does_not_hold_is_refused(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path, **SHARDED)
    index = json.loads((model_dir / INDEX).read_text())
    shard = model_dir / index["weight_map"]["model.norm.weight"]
    rewrite(shard, {"model.norm.weight": None})
    assert refusal(model_dir) == f"tensor model.norm.weight is missing from {shard}, where {INDEX} says it is"
    del index["weight_map"]["model.norm.weight"]
    (model_dir / INDEX).write_text(json.dumps(index))
    assert "tensor model.norm.weight, expected with shape [64], is missing from the files of" in refusal(model_dir)


def test_a_wrong_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path)
    rewrite(model_dir / "model.safetensors", {"model.layers.1.mlp.up_proj.weight": torch.zeros(95, 64)})
    message = refusal(model_dir)
    assert "tensor model.layers.1.mlp.up_proj.weight has shape [95, 64]; config.json makes it [96, 64]" in message


def test_a_config_that_does_not_fit_its_weights_is_refused(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path)
    config = replace(read_decoder_config(model_dir), num_kv_heads=2)
    with pytest.raises(StartupError, match=r"k_proj\.weight has shape \[64, 64\]; config\.json makes it \[32, 64\]"):
        open_weights(model_dir, config)


def test_weights_that_are_not_floats_are_refused(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path)
    rewrite(model_dir / "model.safetensors", {"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    assert "tensor model.norm.weight has dtype 'I8'; it must be F32, F16, BF16" in refusal(model_dir)


@pytest.mark.parametrize("sharding", [{}, SHARDED], ids=["single", "sharded"])
def test_a_truncated_file_is_refused_with_both_sizes(sharding: dict[str, str], tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path, **sharding)
    path = sorted(model_dir.glob("model*.safetensors"))[-1]
    whole_bytes = path.stat().st_size
    os.truncate(path, whole_bytes - 1)
    assert refusal(model_dir) == f"{path} is truncated: expected {whole_bytes} bytes, found {whole_bytes - 1}"


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_a_file_cut_within_its_header_is_refused(size: int, tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path)
    os.truncate(model_dir / "model.safetensors", size)
    message = refusal(model_dir)
    assert "is truncated: expected at least" in message
    assert message.endswith(f"found {size}")


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
def test_an_index_names_plain_files_only(name: str, tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path / "model", **SHARDED)
    (model_dir / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert f"weight_map names the file {name!r}; it must be a plain *.safetensors name" in refusal(model_dir)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path, **SHARDED)
    (model_dir / INDEX).write_text(content)
    assert INDEX in refusal(model_dir)


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[]", "is not a JSON object"),
        (b"{", "is not a JSON object"),
        (b"\xff\xff", "is not a JSON object"),
        (b"[" * 100_000, "is not a JSON object"),
        ({"t": 3}, "tensor t is not described by an object"),
        ({"t": {}}, "missing required field"),
        ({"t": entry(shape=[3])}, r"dtype F32 and shape \[3\] does not fit its data_offsets 0 to 8"),
        ({"t": entry(offsets=[8, 0])}, "data_offsets 8 to 0"),
        ({"t": entry(offsets=[-8, 0])}, r"tensor t: data_offsets\[0\] is -8"),
        ({"t": entry(shape=[1 << 60], offsets=[0, 1 << 62])}, r"shape\[0\] is 1152921504606846976"),
        ({"t": entry(shape=[1 << 46], offsets=[0, 1 << 48])}, "is truncated: expected 281474976710"),
        ({"t": entry(shape=[1] * 9)}, "tensor t: shape is"),
        ({"t": entry(offsets=[0, 8, 16])}, "data_offsets"),
        ({"t": entry(dtype=7)}, "dtype is 7"),
    ],
)
def test_a_header_that_lies_is_refused(header: Any, message: str, tmp_path: Path) -> None:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + b"\0" * 8)
    with pytest.raises(StartupError, match=message):
        SafetensorsFile(path)


def test_a_header_of_impossible_length_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + b"{}")
    with pytest.raises(StartupError, match=f"a header of {2**64 - 1} bytes is over 100000000 bytes"):
        SafetensorsFile(path)
    path.write_bytes((99_999_999).to_bytes(8, "little") + b"{}")
    with pytest.raises(StartupError, match="is truncated: expected at least 100000007 bytes, found 10"):
        SafetensorsFile(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    damage=st.dictionaries(st.integers(0, 300), st.integers(0, 255), min_size=1, max_size=3),
    num_bytes=st.integers(0, 340),
)
def test_a_damaged_file_opens_or_is_refused(damage: dict[int, int], num_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "damaged.safetensors"
    save_file({"a": torch.ones(4, 2), "b": torch.ones(3, dtype=torch.float16)}, path, metadata={"format": "pt"})
    content = bytearray(path.read_bytes())
    for position, value in damage.items():
        if position < len(content):
            content[position] = value
    path.write_bytes(content[:num_bytes])
    try:
        file = SafetensorsFile(path)
    except StartupError:
        return
    file.close()
    assert all(t.first_byte + t.num_bytes <= num_bytes for t in file.tensors.values())


MEASURE_PEAK = """
import re, sys
from pathlib import Path
import torch
from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.weights import open_weights

def read_bytes(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

model_dir = Path(sys.argv[1])
config = read_decoder_config(model_dir)
torch.ones(1 << 20, dtype=torch.bfloat16).float()  # torch's own threads and tables
for dtype in (torch.bfloat16, torch.float32):
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


def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
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
