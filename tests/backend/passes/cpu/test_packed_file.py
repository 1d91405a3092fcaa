"""Packed weights in a file of the cache directory."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.backend.checkpoint import fingerprint
from penstock.backend.checkpoint.quantization import quantized_checkpoint
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.cpu.path_choice import load_kernels
from penstock.backend.passes.cpu.weight_memory import shared
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.passes.shared_weights import packed_file
from penstock.process import cache_directory
from tests.backend.passes.decoder.driver import Driver
from tests.checkpoints import make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.shm.memory.fd_mailbox import FdMailbox

PROMPT = [5, 6, 7, 8, 9]
real_packed_file = shared.packed_file


@pytest.fixture(scope="module", autouse=True)
def native_kernels() -> None:
    if load_kernels() is None:
        pytest.skip("this machine has no native kernels")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of packed weights."""
    monkeypatch.setattr(shared, "packed_file", real_packed_file)
    monkeypatch.setattr(packed_file, "cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "weights"


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The checkpoints that were read, to be packed, in order."""
    found: list[Path] = []
    open_weights = quantized_checkpoint.open_served_weights

    def read(model_dir: Path, *args: Any, **options: Any) -> Any:
        found.append(model_dir)
        return open_weights(model_dir, *args, **options)

    monkeypatch.setattr(quantized_checkpoint, "open_served_weights", read)
    return found


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=1)


def load(model_dir: Path, quantize: str = "int8", **options: Any) -> CpuDecoderPass:
    return CpuDecoderPass.load(model_dir, PassOptions(**{"dtype": "bf16", "quantize": quantize, **options}))


def logits(loaded: CpuDecoderPass) -> np.ndarray:
    """Return the last token's logits; closes the pass."""
    driver = Driver(loaded, num_pages=4, page_size=16)
    found = driver.step([(driver.add(PROMPT), len(PROMPT))])[0]
    loaded.close()
    return np.array(found)


def is_mapped(loaded: CpuDecoderPass) -> bool:
    return loaded.shared_weights is not None and loaded.shared_weights.is_mapped


def starts_mapped(model_dir: Path, **options: Any) -> bool:
    with closing(load(model_dir, **options)) as loaded:
        return is_mapped(loaded)


def packed_in(cache: Path) -> Path:
    (path,) = cache.glob("*/packed")
    return path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


CHILD = """
import os, sys
from pathlib import Path
from penstock.backend import main
from penstock.backend.passes.shared_weights import packed_file
directory = Path(sys.argv.pop(1))
packed_file.cache_directory = lambda: directory
main._log_ready = lambda *_: (print({"torch", "transformers"} & {*sys.modules}, flush=True), os._exit(0))
main.main()
"""
"""A backend that ends when it is ready."""


@pytest.mark.parametrize(
    ("architecture", "quantize"), [("gemma2", "int4"), ("gemma3n", "int8"), ("qwen3-next", "int8")]
)
def test_backend_that_maps_the_file_imports_no_torch(
    architecture: str, quantize: str, tmp_path: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model_dir = make_checkpoint(architecture, tmp_path / "model")
    load(model_dir, quantize, task="auto").close()
    socket = tmp_path_factory.mktemp("s") / "socket"
    child = subprocess.run(
        [
            *(sys.executable, "-c", CHILD, cache.parent, "--model", model_dir, "--socket", socket),
            *("--gpu", "none", "--dtype", "bf16", "--quantize", quantize, "--kv-budget", "64MB"),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "mapped" in child.stderr
    assert child.stdout == "set()\n", child.stderr


@pytest.mark.parametrize(
    ("architecture", "quantize"), [("qwen2", "int8"), ("gemma2", "int4"), ("qwen3-moe", "int8"), ("gpt-oss", "int4")]
)
def test_later_starts_map_the_file_and_compute_the_same_bits(
    architecture: str, quantize: str, tmp_path: Path, cache: Path, readings: list[Path], mailbox: FdMailbox
) -> None:
    model_dir = make_checkpoint(architecture, tmp_path / "model")
    first = load(model_dir, quantize)
    second = load(model_dir, quantize, weights_fds=mailbox.fds)
    assert (is_mapped(first), is_mapped(second)) == (False, True)
    assert len(readings) == 1
    with open("/proc/self/maps") as maps:  # both map the pages of the file
        assert sum(str(packed_in(cache)) in line for line in maps) >= 2
    assert mailbox.is_empty
    expected = logits(first)
    np.testing.assert_array_equal(logits(second), expected)
    assert list((tmp_path / "cache").iterdir()) == [cache]  # nothing else is kept
    assert cache.stat().st_mode & 0o777 == 0o700
    assert packed_in(cache).stat().st_mode & 0o777 == 0o600


def test_plain_weights_get_no_file(model_dir: Path, cache: Path) -> None:
    with closing(load(model_dir, "none")) as loaded:
        assert loaded.shared_weights is None
    assert not cache.exists()


def test_other_weights_options_or_code_are_packed_anew(
    model_dir: Path, tmp_path: Path, cache: Path, readings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model_dir).close()
    load(model_dir, dtype="fp32").close()
    assert len(list(cache.glob("*/packed"))) == 2
    make_checkpoint("qwen3", tmp_path / "other", seed=1, num_hidden_layers=1)
    shutil.copy(tmp_path / "other" / "model.safetensors", model_dir / "model.safetensors")  # of the same size
    assert not starts_mapped(model_dir)
    monkeypatch.setattr(fingerprint, "code_hash", lambda: "other")
    assert not starts_mapped(model_dir)
    assert starts_mapped(model_dir)
    assert len(readings) == 4
    assert len(list(cache.glob("*/packed"))) == 2  # in the places of the old ones


def test_whatever_happens_to_the_file_the_bits_stay_right(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path_factory.mktemp("damage")
    monkeypatch.setattr(shared, "packed_file", real_packed_file)
    monkeypatch.setattr(packed_file, "cache_directory", lambda: root / "cache")
    model_dir = make_checkpoint("qwen3", root / "model", num_hidden_layers=1)
    expected = logits(load(model_dir))
    path = packed_in(root / "cache" / "weights")
    content = path.read_bytes()

    def damaged(data: st.DataObject) -> bytes:
        match data.draw(st.sampled_from(["byte", "end", "longer", "other"])):
            case "byte":
                place = data.draw(st.integers(0, len(content) - 1))
                changed = bytearray(content)
                changed[place] ^= 1 << data.draw(st.integers(0, 7))
                return bytes(changed)
            case "end":
                return content[: data.draw(st.integers(0, len(content) - 1))]
            case "longer":
                return content + bytes(data.draw(st.integers(1, 5000)))
        return data.draw(st.binary(max_size=100)) * data.draw(st.integers(0, 100))

    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        path.write_bytes(damaged(data))
        np.testing.assert_array_equal(logits(load(model_dir)), expected)
        assert starts_mapped(model_dir)

    check()


def test_damage_that_a_running_backend_finds_removes_the_file(model_dir: Path, cache: Path) -> None:
    loaded = load(model_dir)
    assert loaded.shared_weights is not None
    assert loaded.shared_weights.check_next() is None
    with packed_in(cache).open("r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    assert "have changed" in str(loaded.shared_weights.check_next())
    assert list(cache.glob("*/packed")) == []
    loaded.close()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda cache: (cache.mkdir(parents=True), cache.chmod(0o777)), "other users can change the directory"),
        (lambda cache: cache.parent.write_text("a file"), "Not a directory"),
    ],
)
def test_directory_that_cannot_be_used_costs_one_warning(
    spoil: Callable[[Path], object], reason: str, model_dir: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(cache)
    with closing(load(model_dir)) as loaded:
        assert loaded.shared_weights is None
    (line,) = warnings(caplog)
    assert "the packed weights cannot be kept: " in line
    assert reason in line


def test_file_that_others_can_write_is_replaced(model_dir: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(model_dir).close()
    packed_in(cache).chmod(0o666)
    assert not starts_mapped(model_dir)
    assert "can be written by others" in warnings(caplog)[0]
    assert packed_in(cache).stat().st_mode & 0o777 == 0o600


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", ["posix_fallocate", "fdatasync", "pwrite"])
def test_full_disk_costs_one_warning_and_leaves_nothing_there(
    step: str,
    model_dir: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = logits(load(model_dir))
    shutil.rmtree(cache)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        alone = load(model_dir)
    assert alone.shared_weights is None
    (line,) = warnings(caplog)
    assert line.endswith("No space left on device; the next start loads them again")
    assert sorted(path.name for path in cache.glob("*/*")) == ["lock", "source"]
    np.testing.assert_array_equal(logits(alone), expected)


def test_too_little_space_is_noticed_before_anything_is_packed(
    model_dir: Path,
    cache: Path,
    mailbox: FdMailbox,
    readings: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(packed_file.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
    assert not starts_mapped(model_dir, weights_fds=mailbox.fds)
    (line,) = warnings(caplog)
    assert "half of the space that is free on the disk" in line
    assert len(readings) == 1
    assert starts_mapped(model_dir, weights_fds=mailbox.fds)  # from the server's memory


def test_least_recently_used_files_and_those_of_removed_models_make_room(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dirs = [make_checkpoint("qwen3", tmp_path / f"model-{i}", num_hidden_layers=1) for i in range(4)]
    for age, model_dir in enumerate(model_dirs[:3]):
        load(model_dir).close()
        os.utime(max(cache.iterdir(), key=lambda path: path.stat().st_mtime_ns), (age, age))
    load(model_dirs[0]).close()  # now the last used one
    each = cache_directory.num_bytes_on_disk(cache) // 3
    monkeypatch.setattr(
        packed_file.shutil,
        "disk_usage",
        lambda _: shutil._ntuple_diskusage(0, 0, int(3.4 * each)),  # type: ignore[attr-defined]
    )
    shutil.rmtree(model_dirs[2])
    load(model_dirs[3]).close()  # three may stay
    assert sorted(path.name.rpartition("-")[0] for path in cache.iterdir()) == ["model-0", "model-1", "model-3"]
    monkeypatch.setattr(
        packed_file.shutil,
        "disk_usage",
        lambda _: shutil._ntuple_diskusage(0, 0, int(1.4 * each)),  # type: ignore[attr-defined]
    )
    load(model_dirs[3], dtype="fp32").close()
    assert {path.name.rpartition("-")[0] for path in cache.iterdir()} == {"model-3"}


def test_second_start_waits_for_the_first_and_maps_its_file(
    model_dir: Path, cache: Path, readings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_second_there, is_first_packing, found = threading.Event(), threading.Event(), []
    read = quantized_checkpoint.open_served_weights

    def read_when_the_second_is_there(*args: Any, **options: Any) -> Any:
        is_first_packing.set()
        is_second_there.wait()
        return read(*args, **options)

    monkeypatch.setattr(quantized_checkpoint, "open_served_weights", read_when_the_second_is_there)
    first = threading.Thread(target=lambda: found.append(load(model_dir)))
    first.start()
    is_first_packing.wait()
    is_second_there.set()
    second = load(model_dir)
    first.join()
    assert is_mapped(second)
    assert len(readings) == 1
    np.testing.assert_array_equal(logits(second), logits(found[0]))


def test_what_a_dead_or_failing_process_left_is_removed(
    model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise StartupError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(quantized_checkpoint, "open_served_weights", broken)
        with pytest.raises(StartupError, match="planted"):
            load(model_dir)
    (directory,) = cache.iterdir()
    assert sorted(path.name for path in directory.iterdir()) == ["lock", "source"]
    (directory / "partial.0").write_bytes(bytes(5000))
    load(model_dir).close()
    assert sorted(path.name for path in directory.iterdir()) == ["lock", "packed", "source"]


def test_file_in_a_read_only_directory_is_mapped(
    model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load(model_dir).close()
    real_open = os.open

    def read_only(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real_open(path, flags, *args, **options)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "utime", refuse)
    assert starts_mapped(model_dir)
    assert warnings(caplog) == []
