"""Safetensors files: copies through windows, and headers that are wrong."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock.backend.checkpoint.formats import tensor_file
from penstock.backend.checkpoint.tensor_files.safetensors_file import SafetensorsFile
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path


def test_tensor_of_many_windows_at_any_offset_is_copied_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "WINDOW_BYTES", 10_002)
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


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


ENTRY = json.dumps(entry()).encode()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[]", "is not a JSON object"),
        (b"{", "is not a JSON object"),
        (b"\xff\xff", "is not a JSON object"),
        (b"[" * 100_000, "is not a JSON object"),
        (b'{"t": %b, "t": %b}' % (ENTRY, ENTRY), "the header: 't' occurs twice"),
        (b'{"t": %b, "\\u0074": %b}' % (ENTRY, ENTRY), "the header: 't' occurs twice"),
        (b'{"t": {"dtype": "F32", "dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}', "'dtype' occurs twice"),
        (b'{"__metadata__": {"format": "pt", "format": "np"}}', "'format' occurs twice"),
        (b'{"t": %b}' % (b"9" * 5000), "is not a JSON object|tensor t is not described"),
        ({"t": 3}, "tensor t is not described by an object"),
        ({"t": {}}, "missing required field"),
        ({"t": entry(shape=[3])}, r"dtype F32 and shape \[3\] does not fit its data_offsets 0 to 8"),
        ({"t": entry(offsets=[8, 0])}, "data_offsets 8 to 0"),
        ({"t": entry(offsets=[-8, 0])}, r"tensor t: data_offsets\[0\] is -8"),
        ({"t": entry(shape=[1 << 60], offsets=[0, 1 << 62])}, r"shape\[0\] is 1152921504606846976"),
        ({"t": entry(shape=[1 << 46], offsets=[0, 1 << 48])}, "is truncated: expected 281474976710"),
        ({"t": entry(), "u": entry(shape=[1], offsets=[4, 8])}, "tensor u begins at byte .*, within t, which ends at"),
        ({"t": entry(shape=[1] * 9)}, "tensor t: shape is"),
        ({"t": entry(offsets=[0, 8, 16])}, "data_offsets"),
        ({"t": entry(dtype=7)}, "dtype is 7"),
    ],
)
def test_wrong_header_is_refused_in_one_line_without_memory(header: Any, message: str, tmp_path: Path) -> None:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + b"\0" * 8)
    tracemalloc.start()
    try:
        with pytest.raises(StartupError, match=message) as error:
            SafetensorsFile(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value)


def test_header_of_impossible_length_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + b"{}")
    with pytest.raises(StartupError, match=f"a header of {2**64 - 1} bytes is over 100000000 bytes"):
        SafetensorsFile(path)
    path.write_bytes((99_999_999).to_bytes(8, "little") + b"{}")
    with pytest.raises(StartupError, match="is truncated: expected at least 100000007 bytes, found 10"):
        SafetensorsFile(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    damage=st.dictionaries(st.integers(0, 300), st.integers(0, 255), min_size=1, max_size=3),
    num_bytes=st.integers(0, 340),
)
def test_damaged_file_opens_or_is_refused(damage: dict[int, int], num_bytes: int, tmp_path: Path) -> None:
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
