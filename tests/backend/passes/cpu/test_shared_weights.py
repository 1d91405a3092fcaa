"""Packed weights that outlive the pass which packed them."""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import mmap
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.backend.checkpoint import fingerprint
from penstock.backend.checkpoint.quantization import quantized_checkpoint
from penstock.backend.checksum import block_sum
from penstock.backend.dtypes import Dtype
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.cpu.library.native_structs import Linear
from penstock.backend.passes.cpu.path_choice import load_kernels
from penstock.backend.passes.cpu.weight_memory.manifest import LinearForm, Manifest, PackedWeight
from penstock.backend.passes.cpu.weight_memory.shared import FilledMemory, SharedMemory, create_memfd
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.passes.shared_weights import sealed_manifest
from penstock.backend.passes.shared_weights.blocks import SharedWeightsError
from penstock.backend.passes.shared_weights.sealed_manifest import DATA_PLACE
from penstock.shm.memory import region
from penstock.shm.memory.fd_mailbox import FdMailbox
from tests.backend.passes.decoder.driver import Driver
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("native_kernels", "keeps_no_files")

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def native_kernels() -> None:
    """Not at collection, when each of the test run's processes would open or even compile them."""
    if load_kernels() is None:
        pytest.skip("this machine has no native kernels")


def load(model_dir: Path, mailbox: FdMailbox, **options: str) -> CpuDecoderPass:
    return CpuDecoderPass.load(model_dir, PassOptions(weights_fds=mailbox.fds, **{"dtype": "bf16", **options}))


def logits(loaded: CpuDecoderPass) -> np.ndarray:
    """Return the last token's logits; closes the pass."""
    driver = Driver(loaded, num_pages=4, page_size=16)
    found = driver.step([(driver.add(PROMPT), len(PROMPT))])[0]
    loaded.close()
    return np.array(found)


@pytest.mark.parametrize(
    ("architecture", "quantize"),
    [
        ("qwen3", "none"),
        ("qwen2", "int8"),
        ("qwen3-next", "int8"),
        ("gemma2", "int4"),
        ("qwen3-moe", "int8"),
        ("cohere", "none"),
        ("gpt-oss", "none"),
    ],
)
def test_next_pass_maps_the_weights_and_computes_the_same_bits(
    architecture: str, quantize: str, tmp_path: Path, mailbox: FdMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = make_checkpoint(architecture, tmp_path)
    alone = CpuDecoderPass.load(model_dir, PassOptions(dtype="bf16", quantize=quantize))
    assert alone.shared_weights is None
    first = load(model_dir, mailbox, quantize=quantize)
    assert first.shared_weights is not None
    assert not first.shared_weights.is_mapped

    def read_nothing(*_: object) -> None:
        raise AssertionError("the checkpoint is read again")

    monkeypatch.setattr(quantized_checkpoint, "open_served_weights", read_nothing)
    second = load(model_dir, mailbox, quantize=quantize)
    assert second.shared_weights is not None
    assert second.shared_weights.is_mapped
    assert second.shared_weights.num_bytes == first.shared_weights.num_bytes
    assert second.spec == first.spec == alone.spec
    expected = logits(alone)
    np.testing.assert_array_equal(logits(first), expected)
    np.testing.assert_array_equal(logits(second), expected)


def test_other_weights_or_options_are_loaded_and_replace_what_is_held(
    tmp_path: Path, mailbox: FdMailbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model_dir = make_checkpoint("qwen3", tmp_path / "a")
    options = PassOptions(dtype="bf16", weights_fds=mailbox.fds)
    assert CpuDecoderPass.shared_bytes(model_dir, options) == 0
    logits(load(model_dir, mailbox))
    assert CpuDecoderPass.shared_bytes(model_dir, options) > 0
    changed = load(model_dir, mailbox, dtype="fp32")
    assert changed.shared_weights is not None
    assert not changed.shared_weights.is_mapped
    assert "of another checkpoint, other options or other code" in caplog.text
    fp32 = logits(changed)
    make_checkpoint("qwen3", tmp_path / "b", seed=1)
    shutil.copy(tmp_path / "b" / "model.safetensors", model_dir / "model.safetensors")  # of the same size
    assert CpuDecoderPass.shared_bytes(model_dir, options) == 0
    replaced = load(model_dir, mailbox, dtype="fp32")
    assert replaced.shared_weights is not None
    assert not replaced.shared_weights.is_mapped
    assert not np.array_equal(logits(replaced), fp32)
    assert CpuDecoderPass.shared_bytes(model_dir, PassOptions(dtype="fp32", weights_fds=mailbox.fds)) > 0


def test_other_code_has_another_hash(tmp_path: Path) -> None:
    assert all(list(root.rglob("*.py")) for root in fingerprint._CODE_ROOTS)
    with pytest.raises(RuntimeError, match="has no code"):
        fingerprint.hash_code([tmp_path])
    kernel = tmp_path / "passes" / "kernel.cuh"
    kernel.parent.mkdir()
    kernel.write_text("1")
    before = fingerprint.hash_code([tmp_path])
    kernel.write_text("2")
    assert fingerprint.hash_code([tmp_path]) != before


def test_every_changed_byte_of_the_weights_is_noticed_by_its_block() -> None:
    block = np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8)
    for size in (8, 4096, 40_000):
        expected = block_sum(block[:size])
        for place in np.random.default_rng(1).integers(0, size, 200).tolist():
            changed = block[:size].copy()
            changed[place] ^= 1 << place % 8
            assert block_sum(changed) != expected


def test_damaged_weights_are_noticed_by_the_schedule_dropped_and_loaded_again(
    tmp_path: Path, mailbox: FdMailbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = make_checkpoint("qwen3", tmp_path)
    loaded = load(model_dir, mailbox)
    weights = loaded.shared_weights
    assert weights is not None
    assert [weights.check_next() for _ in range(3)] == [None] * 3
    assert weights.num_checks == 3
    damage(loaded)
    # The next pass notices before it uses them.
    again = load(model_dir, mailbox)
    assert "shared weights are dropped, and loaded from their files: bytes 0 to" in caplog.text
    assert again.shared_weights is not None
    assert not again.shared_weights.is_mapped
    # The running one notices too; what its successor has left is another memory, and stays.
    assert "have changed" in str(weights.check_next())
    assert not mailbox.is_empty
    damage(again)
    assert "have changed" in str(again.shared_weights.check_next())
    assert mailbox.is_empty
    loaded.close()
    again.close()


def test_memory_that_cannot_be_read_is_dropped_and_not_filled_again(
    tmp_path: Path, mailbox: FdMailbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    model_dir = make_checkpoint("qwen3", tmp_path)
    loaded = load(model_dir, mailbox)
    assert loaded.shared_weights is not None
    monkeypatch.setattr(os, "preadv", broken)
    assert "cannot be read: Input/output error" in str(loaded.shared_weights.check_next())
    assert mailbox.is_empty
    again = load(model_dir, mailbox)
    assert "the weights cannot be shared: bytes 0 to" in caplog.text
    assert again.shared_weights is None
    monkeypatch.undo()
    np.testing.assert_array_equal(logits(again), logits(loaded))


def damage(loaded: CpuDecoderPass) -> None:
    """Change a byte, as failing hardware would: the memory is read-only for everybody."""
    memory = loaded.ops.weights.memory()[0]  # type: ignore[attr-defined]
    page = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE) == 0
    memory[17] ^= 4


def hostile(weights: tuple[PackedWeight, ...], data_bytes: int, sums: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, DATA_PLACE + data_bytes)
    sealed_manifest.finish(fd, data_bytes, Manifest("", "bf16", weights, (0,) * sums))
    return fd


@pytest.mark.parametrize(
    ("weights", "data_bytes", "sums", "message"),
    [
        ([(0, 1 << 40)], 4096, 1, "does not lie"),
        ([(0, 128), (64, 64)], 4096, 1, "does not lie behind 128"),
        ([(8, 64)], 4096, 1, "does not lie"),
        ([(1 << 61, 1 << 61)], 4096, 1, "does not lie"),
        ([(0, 64)], 4096, 2, "2 checksums for 4096 bytes"),
        ([(0, 64)], 4090, 1, "1 checksums for 4090 bytes"),
    ],
)
def test_hostile_sizes_are_refused(weights: list[tuple[int, int]], data_bytes: int, sums: int, message: str) -> None:
    fd = hostile(tuple(PackedWeight(*weight, None) for weight in weights), data_bytes, sums)
    with pytest.raises(SharedWeightsError, match=message):
        SharedMemory(fd)
    os.close(fd)


def test_memory_that_is_not_sealed_truncated_or_not_ours_is_refused() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 16)
    with pytest.raises(SharedWeightsError, match="seals"):
        SharedMemory(fd)
    os.close(fd)
    header = sealed_manifest.HEADER.pack(sealed_manifest.MAGIC, 1 << 62, 1 << 10, 0)
    for start in (header, bytes(100), header[:20]):
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.pwrite(fd, start, 0)
        os.ftruncate(fd, 1 << 16)
        region.seal(fd)
        with pytest.raises(SharedWeightsError, match="65536 bytes have a header"):
            SharedMemory(fd)
        os.close(fd)


@pytest.mark.parametrize(
    "part", [(1, 7, 0, 0, 0, 0), (1, 4, 0, 1 << 20, 0, 0), (0, 4, 0, 32, 32, 0), (1, 4, 3, 32, 32, 0)]
)
def test_forms_out_of_bounds_are_refused(part: tuple[int, ...]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([[part], False], LinearForm)


@pytest.mark.parametrize(
    "parts",
    [
        [(2, 4, 0, 48, 48, 0)],
        [(2, 4, 0, 32, 0, 0)],
        [(2, 8, 0, 0, 32, 0)],
        [(2, 4, 0, 32, 256, 0)],
        [(3, 8, 0, 0, 0, 0)],
        [(2, 8, 0, 0, 0, 0), (2, 8, 0, 0, 0, 0)],
        [(1, 0, 0, 0, 0, 0), (2, 8, 0, 0, 0, 0)],
    ],
)
def test_forms_that_the_kernels_lack_are_refused(parts: list[tuple[int, ...]]) -> None:
    form = msgspec.convert([parts, False], LinearForm)
    with pytest.raises(SharedWeightsError, match="in a linear of"):
        form.give_to(Linear(inputs=96, outputs=128))


def test_manifest_of_another_model_is_refused_and_the_weights_are_loaded(
    tmp_path: Path, mailbox: FdMailbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its fingerprint is right, but its sizes are not."""
    shared = FilledMemory(create_memfd())
    shared.place(64)
    shared.finish("right", Dtype.BF16)
    mailbox.leave(shared.fds)
    monkeypatch.setattr("penstock.backend.passes.cpu.weight_memory.shared.fingerprint", lambda *_: "right")
    loaded = load(make_checkpoint("qwen3", tmp_path), mailbox)
    assert "shared weights are dropped" in caplog.text
    assert loaded.shared_weights is not None
    assert not loaded.shared_weights.is_mapped
    loaded.close()
    shared.close()


def test_weights_that_cannot_be_held_are_loaded_without(
    tmp_path: Path, mailbox: FdMailbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = itertools.count()

    def without_memory(*_: int) -> None:
        if next(calls) == 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", without_memory)
    loaded = load(make_checkpoint("qwen3", tmp_path), mailbox)
    assert "the weights cannot be shared: [Errno 28] No space left on device" in caplog.text
    assert loaded.shared_weights is None
    assert mailbox.is_empty
    loaded.close()
