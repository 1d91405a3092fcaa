"""Recordings become traces that follow the rules of the Trace Event Format; what is no recording is refused."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.commands.recorder.command import copy_records, timeline
from penstock.commands.recorder.timeline import make_trace
from penstock.serve.backend_children import MAX_FILES, CrashFiles
from penstock.shm.memory.ring import MIN_RING_BYTES, RingReader, RingWriter, create_fd
from penstock.shm.recording.events import BackendStarted, pack_event
from penstock.shm.recording.file import RecordingWriter, read_recording
from penstock.shm.recording.records import FORMAT_VERSION
from tests.backend.recorded import Recorded


def record_requests() -> Recorded:
    """Ten requests in four slots with few pages: some wait, some are preempted, two are coalesced, one is cancelled."""
    recorded = Recorded(num_pages=9, max_running=4, max_batch_tokens=8, max_context=36)
    bench = recorded.bench
    for request_id in range(10):
        prompt = [request_id // 2, 3, 5, 7, 11, 13]
        bench.submit(prompt, 20, request_id=request_id, frontend=1 + request_id % 2, may_share=request_id < 2)
    for _ in range(6):
        bench.turn()
    bench.cancel(6, 1)
    bench.run_dry()
    assert bench.board.preemptions
    assert bench.board.requests_coalesced
    return recorded


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    recorded = record_requests()
    reader = RingReader(recorded.fd)
    with RecordingWriter(tmp_path / "out.rec") as file:
        file.write(reader.read())
    reader.close()
    recorded.close()
    return tmp_path / "out.rec"


def check_trace(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Check the rules of the Trace Event Format; return the events by phase."""
    by_phase: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert event["name"]
        if event["ph"] != "M":
            assert event["ts"] >= 0
        by_phase[event["ph"]].append(event)
    assert set(by_phase) <= set("XbeiCM")
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in by_phase["X"]:
        assert event["dur"] >= 0
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():  # they follow each other: none crosses another one's end
        slices.sort()
        assert all(end <= begin + 0.01 for (_, end), (begin, _) in pairwise(slices))
    ends = {(event["pid"], event["cat"], event["id2"]["local"]): event["ts"] for event in by_phase["e"]}
    begins = {(event["pid"], event["cat"], event["id2"]["local"]): event["ts"] for event in by_phase["b"]}
    assert len(ends) == len(by_phase["e"])
    assert all(begins[name] <= end for name, end in ends.items())
    assert all(event["s"] in "gpt" for event in by_phase["i"])
    assert all(isinstance(value, int) for event in by_phase["C"] for value in event["args"].values())
    assert {event["name"] for event in by_phase["M"]} == {"process_name", "thread_name"}
    named = {(event["pid"], event["tid"]) for event in by_phase["M"] if event["name"] == "thread_name"}
    assert set(tracks) <= named
    return by_phase


def test_trace_follows_the_formats_rules_and_shows_every_step_and_request(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline(recording)
    assert "open it at https://ui.perfetto.dev" in capsys.readouterr().out
    by_phase = check_trace(json.loads(recording.with_suffix(".json").read_text()))
    device = [event for event in by_phase["X"] if "step" in event["name"]]
    assert sorted(event["args"]["step"] for event in device) == list(range(len(device)))
    requests = [event for event in by_phase["b"] if event["cat"] == "request"]
    assert sorted(event["args"]["request"] for event in requests) == list(range(10))
    assert {event["name"] for event in requests} == {"requests of frontend 1", "requests of frontend 2"}
    assert [event["args"]["request"] for event in requests if event["args"]["end"] != "length"] == [6]
    assert {event["name"] for event in by_phase["b"] if event["cat"] == "plan"} == {"executor: plans that wait"}
    names = [event["args"]["name"] for event in by_phase["M"]]
    assert sum(name.startswith("sequence ") for name in names) == 8  # two requests share one, and one never ran
    told = {event["name"] for event in by_phase["i"]}
    assert {"preempted", "request 6 is cancelled", "request 2/1 joins"} <= told
    decoded = sum(event["args"]["tokens"] for event in by_phase["X"] if event["name"] == "decode")
    assert decoded > 8 * 15


def test_loop_has_no_slice_while_it_waits_for_requests(tmp_path: Path) -> None:
    recorded = Recorded()
    recorded.recorder._clock = recorded.bench.clock
    for request_id in range(2):
        recorded.bench.submit([3, 5, 7], 4, request_id=request_id)
        recorded.bench.run_dry()
        for _ in range(5):
            recorded.bench.now_s += 20.0
            recorded.bench.turn()
    trace = make_trace([recorded.life()])
    recorded.close()
    turns = [event for event in trace["traceEvents"] if event["name"] == "turn"]
    assert turns
    assert max(event["dur"] for event in turns) < 1e6


def test_recording_that_is_cut_off_or_of_another_kind_is_said_in_one_line(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = recording.read_bytes()
    recording.write_bytes(whole + whole[-20:])
    timeline(recording)
    said = capsys.readouterr()
    assert said.err == f"{recording}: it is cut off at byte {len(whole)}; what comes before that is read\n"
    check_trace(json.loads(recording.with_suffix(".json").read_text()))
    recording.write_bytes(whole[:8] + bytes([9]) + whole[9:])
    for path, message in (
        (recording, "is a recording of format 9; this version of Penstock reads format 2\n"),
        (recording.with_name("missing.rec"), "missing.rec: No such file or directory\n"),
    ):
        with pytest.raises(SystemExit):
            timeline(path)
        said = capsys.readouterr()
        assert said.err.startswith("penstock timeline: ")
        assert said.err.endswith(message)
        assert said.err.count("\n") == 1


def test_recording_begins_with_known_rows_and_goes_on_as_long_as_it_is_asked_to(tmp_path: Path) -> None:
    recorded = record_requests()
    reader = RingReader(recorded.fd)

    def wait(_seconds: float) -> None:
        recorded.bench.submit([1, 2, 3], 3, request_id=99)
        recorded.bench.run_dry()
        raise KeyboardInterrupt

    copy_records(reader, tmp_path / "out.rec", 60.0, with_tokens=False, wait=wait)
    found = read_recording(tmp_path / "out.rec")
    assert (found.gaps, found.problem) == ([], "")
    timeline(tmp_path / "out.rec")
    trace = check_trace(json.loads((tmp_path / "out.json").read_text()))
    assert any(event["id2"]["local"].endswith("/99") for event in trace["e"])
    reader.close()
    recorded.close()


def test_crashes_are_kept_up_to_a_number_of_files(tmp_path: Path) -> None:
    fd = create_fd(MIN_RING_BYTES)
    writer = RingWriter(fd)
    started = BackendStarted(FORMAT_VERSION, 1, 0.0, "fake", 8, 16, 64, 4, 256, 97, 1000, 1)
    writer.write_note(pack_event(started, 0.0))
    said: list[str] = []
    directory = tmp_path / "crashes"
    crashes = CrashFiles(fd, directory, "embedding backend", said.append)
    for second in range(MAX_FILES + 3):
        writer.append(pack_event(started, float(second)))
        crashes.write()
        crashes.write()  # nothing new
    assert len(said) == MAX_FILES + 3
    files = sorted(directory.iterdir())
    assert len(files) == MAX_FILES
    assert any(str(path) in said[-1] for path in files)
    times = [record.time_s for path in files for record in read_recording(path).records[1:]]
    assert max(times) == MAX_FILES + 2
    directory.chmod(0o755)
    writer.append(pack_event(started, 99.0))
    crashes.write()
    assert "cannot be kept" in said[-1]
    assert "chmod 700" in said[-1]
    writer.close()
    os.close(fd)
