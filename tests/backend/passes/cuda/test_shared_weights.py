"""Packed weights in blocks of the (emulated) GPU's memory that outlive the pass which packed them."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.checksum import block_sum
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.cuda.memory.shared_weights import DeviceMemories
from penstock.backend.passes.cuda.memory.weight_manifest import (
    DeviceManifest,
    SharedForm,
    SharedTensor,
    SharedWeight,
    read_manifest,
)
from penstock.backend.passes.decoder.cuda_pass import loading
from penstock.backend.passes.shared_weights import sealed_manifest
from penstock.backend.passes.shared_weights.blocks import BLOCK_BYTES, SharedWeightsError
from penstock.shm.buffers.device_api import DeviceError
from penstock.shm.memory.fd_mailbox import FdMailbox, close_all
from tests.backend.passes.cuda.emulated_device import EmulatedBlocks, EmulatedDevice
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.cuda.tiny_models import checkpoint, make_pass, prompts, run_prompts
from tests.backend.passes.decoder.driver import Driver
from tests.shm.buffers.stub_driver import COMPILER

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="the stub driver needs a C compiler"),
    pytest.mark.usefixtures("keeps_no_files"),
]


def settings(mailbox: FdMailbox | None, dtype: str = "bf16", quantize: str = "none") -> PassOptions:
    fds = None if mailbox is None else mailbox.fds
    return PassOptions(dtype=dtype, max_running=6, max_batch_tokens=128, quantize=quantize, weights_fds=fds)


def logits(loaded: EmulatedCudaPass) -> list[np.ndarray]:
    """Return two prompts' logits; closes the pass."""
    driver = Driver(loaded, num_pages=32, page_size=16)
    found = [np.array(each) for each in run_prompts(driver, prompts((5, 17)))]
    loaded.close()
    return found


def end(loaded: EmulatedCudaPass) -> None:
    """Close a pass that has no cache."""
    assert loaded.shared_weights is not None
    loaded.shared_weights.close()
    loaded._memory.unmap()


def is_mapped(loaded: EmulatedCudaPass) -> bool:
    assert loaded.shared_weights is not None
    return loaded.shared_weights.is_mapped


@pytest.mark.parametrize(
    ("architecture", "quantize"),
    [("qwen3", "none"), ("llama-tied", "int4"), ("qwen3-moe", "int8"), ("gpt-oss", "none"), ("cohere", "none")],
)
def test_next_pass_maps_the_weights_and_computes_the_same_bits(
    architecture: str, quantize: str, mailbox: FdMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = checkpoint(architecture)
    alone = EmulatedCudaPass.load(model_dir, settings(None, quantize=quantize))
    assert alone.shared_weights is None
    options = settings(mailbox, quantize=quantize)
    first = EmulatedCudaPass.load(model_dir, options)
    assert not is_mapped(first)
    shared_bytes = EmulatedCudaPass.shared_bytes(model_dir, options)
    assert 0 < first.shared_weights.num_bytes <= shared_bytes < first.shared_weights.num_bytes + (34 << 20)  # type: ignore[union-attr]

    def read_nothing(*_: object) -> None:
        raise AssertionError("the checkpoint is read again")

    monkeypatch.setattr(loading, "open_served_weights", read_nothing)
    second = EmulatedCudaPass.load(model_dir, options)
    assert is_mapped(second)
    assert second.spec == first.spec == alone.spec
    expected = logits(alone)
    for loaded in (first, second):
        np.testing.assert_array_equal(logits(loaded), expected)
    third = EmulatedCudaPass.load(model_dir, options)  # nobody has them mapped any more
    np.testing.assert_array_equal(logits(third), expected)


def test_other_weights_or_options_are_loaded_and_the_old_ones_are_freed(
    mailbox: FdMailbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model_dir = Path(shutil.copytree(checkpoint("llama3"), tmp_path / "model"))
    end(EmulatedCudaPass.load(model_dir, settings(mailbox)))
    changed = EmulatedCudaPass.load(model_dir, settings(mailbox, dtype="fp32"))
    assert not is_mapped(changed)
    assert "of another checkpoint, other options or other code" in caplog.text
    end(changed)
    (model_dir / "model.safetensors").touch()
    assert EmulatedCudaPass.shared_bytes(model_dir, settings(mailbox, dtype="fp32")) == 0
    assert mailbox.is_empty


def test_damage_is_noticed_at_a_start_and_by_the_schedule(mailbox: FdMailbox, caplog: pytest.LogCaptureFixture) -> None:
    model_dir = checkpoint("llama3")
    loaded = EmulatedCudaPass.load(model_dir, settings(mailbox))
    assert loaded.shared_weights is not None
    assert [loaded.shared_weights.check_next() for _ in range(3)] == [None] * 3
    blocks = loaded._memory._range  # type: ignore[attr-defined]
    blocks.tensor(0, 20)[17] ^= 4
    again = EmulatedCudaPass.load(model_dir, settings(mailbox))
    assert "shared weights are dropped, and loaded from their files: bytes 0 to" in caplog.text
    assert not is_mapped(again)
    # The running one notices too; what its successor has left is other memory, and stays.
    assert "have changed" in str(loaded.shared_weights.check_next())
    assert not mailbox.is_empty
    end(loaded)
    np.testing.assert_array_equal(logits(again), logits(make_pass(dtype="bf16")))


def test_weights_of_a_lost_device_stay_for_the_next_backend(
    mailbox: FdMailbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bytes:
        raise DeviceError("the device is lost")

    loaded = EmulatedCudaPass.load(checkpoint("llama3"), settings(mailbox))
    assert loaded.shared_weights is not None
    monkeypatch.setattr(EmulatedBlocks, "read", fail)
    assert [loaded.shared_weights.check_next() for _ in range(3)] == [None] * 3
    assert caplog.text.count("cannot be read, and are checked no more: the device is lost") == 1
    assert loaded.shared_weights.num_checks == 0
    assert not mailbox.is_empty
    end(loaded)


def test_weights_that_the_device_cannot_read_are_loaded_by_the_next_start(
    mailbox: FdMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After such an error nothing runs in the process. But each further start would fail in the same place."""

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    end(EmulatedCudaPass.load(checkpoint("llama3"), settings(mailbox)))
    with monkeypatch.context() as broken:
        broken.setattr(EmulatedBlocks, "tensor", fail)
        with pytest.raises(RuntimeError, match="ECC"):
            EmulatedCudaPass.load(checkpoint("llama3"), settings(mailbox))
    assert mailbox.is_empty
    loaded = EmulatedCudaPass.load(checkpoint("llama3"), settings(mailbox))
    assert not is_mapped(loaded)
    end(loaded)


class PassWithoutRoom(EmulatedCudaPass):
    """The weights fit, what comes after them does not."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("are_held", [True, False])
def test_pass_without_room_beside_its_weights_leaves_them_as_they_were(mailbox: FdMailbox, are_held: bool) -> None:
    if are_held:
        end(EmulatedCudaPass.load(checkpoint("llama3"), settings(mailbox)))
    with pytest.raises(StartupError, match=r"do not fit the GPU: CUDA out of memory\. Tried to allocate"):
        PassWithoutRoom.load(checkpoint("llama3"), settings(mailbox))
    assert "penstock-stub-block" not in Path("/proc/self/maps").read_text()
    assert mailbox.is_empty is not are_held
    loaded = EmulatedCudaPass.load(checkpoint("llama3"), settings(mailbox))
    assert is_mapped(loaded) is are_held
    end(loaded)


def test_checksums_of_the_device_are_those_of_the_host_across_blocks() -> None:
    filled = DeviceMemories(EmulatedDevice(), 1).fill()
    numbers = np.random.default_rng(0).integers(0, 256, 2 * BLOCK_BYTES + 5000, dtype=np.uint8)
    tensor = torch.from_numpy(numbers)
    kept = filled.place(lambda: tensor, tensor.shape, tensor.dtype)
    assert len(filled._range.block_bytes) == 2
    blocks = filled.finish("f", Dtype.BF16)
    assert [blocks.check(block) for block in range(len(blocks))] == [None] * 3
    content = kept.numpy()
    assert blocks._sums[0] == block_sum(content[:BLOCK_BYTES])
    for place in (0, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 4999):
        content[place] ^= 1
        with pytest.raises(SharedWeightsError, match="have changed"):
            blocks.check(place // BLOCK_BYTES)
        content[place] ^= 1
    filled.close()


@pytest.mark.parametrize("fails", ["at once", "later", "when it is left"])
def test_refused_memory_leaves_a_plain_load_and_one_line(
    mailbox: FdMailbox, fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fails == "at once":
        monkeypatch.setenv("STUB_CUDA_NO_BLOCKS", "1")
        reason = "the device gives no file descriptors of its memory"
    elif fails == "later":
        reason = "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)"
        tensor, calls = EmulatedBlocks.tensor, itertools.count()

        def refuse(self: EmulatedBlocks, begin: int, num_bytes: int) -> torch.Tensor:
            if next(calls) == 5:
                raise DeviceError(reason)
            return tensor(self, begin, num_bytes)

        monkeypatch.setattr(EmulatedBlocks, "tensor", refuse)
    else:
        reason = "[Errno 109] too many"

        def leave(_self: FdMailbox, _fds: object) -> None:
            raise OSError(109, "too many")

        monkeypatch.setattr(FdMailbox, "leave", leave)
    loaded = EmulatedCudaPass.load(checkpoint("llama3"), settings(mailbox))
    assert f"the weights cannot be shared: {reason}; the next start loads them again" in caplog.text
    assert loaded.shared_weights is None
    assert mailbox.is_empty
    assert "penstock-stub-block" not in Path("/proc/self/maps").read_text()  # what was filled is freed
    np.testing.assert_array_equal(logits(loaded), logits(make_pass(dtype="bf16")))


WEIGHT = SharedWeight((SharedTensor(0, "bf16", (4, 8)),), None)


@pytest.mark.parametrize(
    ("weights", "data_bytes", "block_bytes", "num_sums", "message"),
    [
        ([WEIGHT], 512, (), 1, "1 blocks are shared; the manifest has 0 of 0 bytes for 512"),
        ([WEIGHT], 4 << 20, (2 << 20,), 1, "the manifest has 1 of 2097152 bytes for 4194304"),
        ([WEIGHT, WEIGHT], 512, (2 << 20,), 1, "64 bytes at 0 does not lie behind 64 within 512"),
        ([SharedWeight((SharedTensor(8, "bf16", (4, 8)),), None)], 512, (2 << 20,), 1, "at 8 does not lie"),
        (
            [SharedWeight((SharedTensor(0, "bf16", (1 << 40, 1 << 40)),), None)],
            512,
            (2 << 20,),
            1,
            "does not lie behind",
        ),
        ([WEIGHT], 512, (2 << 20,), 2, "2 checksums for 512 bytes"),
        ([WEIGHT], 500, (2 << 20,), 1, "1 checksums for 500 bytes"),
    ],
)
def test_hostile_manifests_are_refused(
    weights: list[SharedWeight], data_bytes: int, block_bytes: tuple[int, ...], num_sums: int, message: str
) -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    sealed_manifest.finish(fd, 0, DeviceManifest("", "bf16", data_bytes, block_bytes, tuple(weights), (0,) * num_sums))
    with pytest.raises(SharedWeightsError, match=message):
        read_manifest(fd, 1)
    os.close(fd)


@pytest.mark.parametrize(
    "form",
    [SharedForm("packed", {"group_size": "x"}), SharedForm("grouped", {}), SharedForm("float8", {"group_size": 1.5})],
)
def test_forms_that_do_not_exist_are_refused(form: SharedForm) -> None:
    with pytest.raises(SharedWeightsError, match=f"a form of kind {form.kind}"):
        form.read()


def test_weights_of_another_model_with_the_right_fingerprint_are_refused_and_loaded(
    mailbox: FdMailbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "packing_fingerprint", lambda *_: "right")
    end(EmulatedCudaPass.load(checkpoint("qwen3"), settings(mailbox)))
    loaded = EmulatedCudaPass.load(checkpoint("llama3"), settings(mailbox))
    assert "shared weights are dropped" in caplog.text
    assert not is_mapped(loaded)
    end(loaded)
    fds = mailbox.find()
    assert len(fds) == 2
    close_all(fds)
