"""Recordings on disk: read back as written, and as far as they are whole."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shm.memory.ring import Stretch
from penstock.shm.recording.file import RecordingError, RecordingWriter, read_recording
from penstock.shm.recording.records import SECRET_KINDS, Kind, Record, pack, unpack

records = st.builds(pack, st.sampled_from(Kind), st.floats(0, 1e9), st.binary(max_size=200))
stretches = st.lists(st.lists(records, max_size=5), max_size=5)


def write(path: Path, pieces: list[list[bytes]], *, with_tokens: bool = True) -> list[Record]:
    position = 0
    with RecordingWriter(path, with_tokens=with_tokens) as file:
        for piece in pieces:
            file.write(Stretch(position, position + 100, piece))
            position += 100
    return [unpack(record) for piece in pieces for record in piece]


@given(pieces=stretches, with_tokens=st.booleans(), data=st.data())
def test_file_is_read_as_far_as_it_is_whole(pieces: list[list[bytes]], with_tokens: bool, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "out.rec")
        written = write(path, pieces, with_tokens=with_tokens)
        expected = [record for record in written if with_tokens or record.kind not in SECRET_KINDS]
        recording = read_recording(path)
        assert (recording.records, recording.gaps, recording.problem) == (expected, [], "")
        whole = path.read_bytes()
        header = len(whole) if not pieces else 16
        size = data.draw(st.integers(header, len(whole)))
        path.write_bytes(whole[:size])
        cut = read_recording(path)
        assert cut.records == expected[: len(cut.records)]
        assert cut.problem == "" or "cut off at byte" in cut.problem
        if size == len(whole):
            assert (cut.records, cut.problem) == (expected, "")
        if len(whole) > header:
            place = data.draw(st.integers(header, len(whole) - 1))
            path.write_bytes(
                whole[:place] + bytes([whole[place] ^ 1 << data.draw(st.integers(0, 7))]) + whole[place + 1 :]
            )
            damaged = read_recording(path)
            assert "damaged at byte" in damaged.problem or "cut off at byte" in damaged.problem
            assert damaged.records == expected[: len(damaged.records)]


def test_missing_records_are_counted(tmp_path: Path) -> None:
    record = pack(Kind.EVENT, 1.0, b"12345678")
    with RecordingWriter(tmp_path / "out.rec") as file:
        for begin, end in ((0, 24), (24, 48), (72, 96)):
            file.write(Stretch(begin, end, [record]))
    assert read_recording(tmp_path / "out.rec").gaps == [2]


def test_other_files_and_other_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.rec"
    path.write_bytes(b"PENST")
    with pytest.raises(RecordingError, match=r"out\.rec is not a recording of Penstock"):
        read_recording(path)
    path.unlink()
    write(path, [])
    with pytest.raises(FileExistsError):
        RecordingWriter(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    data = bytearray(path.read_bytes())
    data[8] = 77
    path.write_bytes(data)
    with pytest.raises(RecordingError, match="is a recording of format 77; this version of Penstock reads format 2"):
        read_recording(path)
