"""The file that keeps quantised weights for the next start: used when it is whole, made again when it is not."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.quantization import cached_file
from penstock.backend.checkpoint.quantization.modes import QUANTIZATIONS
from penstock.backend.checkpoint.quantization.quantized_checkpoint import open_quantized
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.dtypes import Dtype
from tests.backend.checkpoint.quantization.loading import load, same
from tests.backend.checkpoint.weight_files import rewrite
from tests.checkpoints import make_checkpoint


def kept_path(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_second_start_reads_the_cached_file(mode: str, model_dir: Path, cache: Path) -> None:
    first, quantised = load(model_dir, mode)
    assert quantised.work.running == f"Quantising weights to {mode}"
    assert quantised.done_bytes == quantised.total_bytes
    path = kept_path(cache)
    assert path.stat().st_mode & 0o777 == 0o600
    second, loaded = load(model_dir, mode)
    assert same(second, first)
    assert loaded.work.running == "Loading weights"
    assert loaded.done_bytes == loaded.total_bytes
    assert kept_path(cache) == path
    # As the safetensors package reads it.
    stored = load_file(path)
    assert torch.equal(stored["layers.2.down.values"], second["2.down"].values)
    with safe_open(path, "pt") as file:
        assert file.metadata()["penstock.quantization"] == mode


def test_experts_are_kept(tmp_path: Path) -> None:
    model_dir = make_checkpoint("mixtral", tmp_path / "model")
    first, second = load(model_dir), load(model_dir)
    assert {"0.expert_gate_up", "2.expert_down"} < first[0].keys()
    assert same(second[0], first[0])
    assert second[1].work.running == "Loading weights"


def test_modes_and_checkpoints_have_files_of_their_own(model_dir: Path, tmp_path: Path, cache: Path) -> None:
    other = shutil.copytree(model_dir, tmp_path / "copy")
    first = [load(model_dir, "int8")[0], load(model_dir, "int4")[0], load(other, "int4")[0]]
    assert len(list(cache.iterdir())) == 3
    second = [load(model_dir, "int8")[0], load(model_dir, "int4")[0], load(other, "int4")[0]]
    assert all(same(a, b) for a, b in zip(first, second, strict=True))


def test_changed_checkpoint_is_quantised_again(model_dir: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = load(model_dir)
    rewrite(model_dir / "model.safetensors", {"lm_head.weight": torch.ones(256, 64, dtype=torch.bfloat16)})
    with caplog.at_level(logging.INFO, "penstock.backend"):
        second, _ = load(model_dir)
    assert not same(second, first)
    assert [message for message in caplog.messages if "other weights" in message]
    assert same(load(model_dir)[0], second)
    assert len(list(cache.iterdir())) == 1


def test_touched_checkpoint_is_quantised_again(model_dir: Path) -> None:
    """Samples might miss a small change in a large file, its time does not."""
    load(model_dir)
    assert load(model_dir)[1].work.running == "Loading weights"
    os.utime(model_dir / "model.safetensors", (1, 1))
    assert load(model_dir)[1].work.running.startswith("Quantising")


def cut(data: bytes) -> bytes:
    return data[:-1]


def flip(data: bytes) -> bytes:
    """A bit of the last tensor."""
    return data[:-1] + bytes([data[-1] ^ 1])


def edit_header(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return edit


def _swap_shape(header: dict[str, Any]) -> None:
    header["lm_head.values"]["shape"].reverse()


def _rename(header: dict[str, Any]) -> None:
    header["x"] = header.pop("lm_head.values")


def _drop_checksum(header: dict[str, Any]) -> None:
    del header["__metadata__"]["crc32 lm_head.values"]


def _drop_metadata(header: dict[str, Any]) -> None:
    del header["__metadata__"]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "truncated": cut,
    "flipped bit": flip,
    "not safetensors": lambda data: b"\xff" * len(data),
    "other shape": edit_header(_swap_shape),
    "other name": edit_header(_rename),
    "no checksum": edit_header(_drop_checksum),
    "no metadata": edit_header(_drop_metadata),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_made_again(
    damage: str, model_dir: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = load(model_dir)
    path = kept_path(cache)
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[damage](whole))
    with caplog.at_level(logging.WARNING, "penstock.backend"):
        assert same(load(model_dir)[0], first)
    (line,) = warnings(caplog)
    assert str(path) in line
    assert "quantised again" in line
    load(model_dir)  # where the damage was found while loading, this start makes the file
    assert path.read_bytes() == whole


def test_values_out_of_range_are_refused_in_spite_of_their_checksum(
    model_dir: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = load(model_dir, "int8")
    path = kept_path(cache)
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    scales = 8 + size + json.loads(data[8 : 8 + size])["lm_head.scales"]["data_offsets"][0]
    data[scales : scales + 4] = b"\0\0\x80\x7f"  # infinity
    path.write_bytes(data)
    monkeypatch.setattr(cached_file.CachedFile, "_check_sum", lambda *_: None)
    with caplog.at_level(logging.WARNING, "penstock.backend"):
        assert same(load(model_dir, "int8")[0], first)
    assert "scales must be finite" in warnings(caplog)[0]


def test_file_that_others_can_write_is_replaced(model_dir: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = load(model_dir)
    path = kept_path(cache)
    path.chmod(0o666)
    with caplog.at_level(logging.WARNING, "penstock.backend"):
        assert same(load(model_dir)[0], first)
    assert "can be written by others" in warnings(caplog)[0]
    assert path.stat().st_mode & 0o777 == 0o600


def check_not_kept(model_dir: Path, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """The weights are there, and one line says why they are not kept."""
    with caplog.at_level(logging.WARNING, "penstock.backend"):
        assert len(load(model_dir)[0]) == 13
    (line,) = warnings(caplog)
    assert line.startswith("The quantised weights cannot be kept, so the next start quantises them again: ")
    assert reason in line


def test_directory_that_others_can_write_keeps_nothing(
    model_dir: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    check_not_kept(model_dir, caplog, "is not safe: other users can change the directory")
    assert list(cache.iterdir()) == []


def test_cache_that_cannot_be_made_keeps_nothing(
    model_dir: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.parent.write_text("a file")
    check_not_kept(model_dir, caplog, "Not a directory")


def test_disk_that_is_too_small_keeps_nothing(
    model_dir: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_file.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
    check_not_kept(model_dir, caplog, "are needed, 5 B are free")
    assert list(cache.iterdir()) == []


def test_disk_that_fills_up_keeps_nothing(
    model_dir: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = cached_file.CachedFileWriter.write

    def write_or_fail(writer: cached_file.CachedFileWriter, linear: str, weight: QuantizedWeight) -> None:
        if linear == "layers.1.o":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(writer, linear, weight)

    monkeypatch.setattr(cached_file.CachedFileWriter, "write", write_or_fail)
    check_not_kept(model_dir, caplog, "No space left on device")
    assert list(cache.iterdir()) == []


def test_file_that_another_process_writes_is_left_to_it(
    model_dir: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(model_dir)
    path = kept_path(cache)
    partial = path.with_name(f"{path.name}.partial")
    path.unlink()
    with partial.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        check_not_kept(model_dir, caplog, "temporarily unavailable")
    assert list(cache.iterdir()) == [partial]
    load(model_dir)  # its owner has died
    assert list(cache.iterdir()) == [path]


def test_load_of_some_linears_leaves_no_file(model_dir: Path, cache: Path) -> None:
    with open_quantized(model_dir, read_decoder_config(model_dir), QUANTIZATIONS["int8"]) as weights:
        weights.layer(0, Dtype.BF16)
    assert list(cache.iterdir()) == []


def test_load_that_fails_leaves_no_file(model_dir: Path, cache: Path) -> None:
    def load_and_fail() -> None:
        with open_quantized(model_dir, read_decoder_config(model_dir), QUANTIZATIONS["int8"]) as weights:
            weights.layer(0, Dtype.BF16)
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        load_and_fail()
    assert list(cache.iterdir()) == []
