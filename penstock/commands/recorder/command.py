"""`penstock record`, which copies the records of a running backend into a file, and `penstock timeline`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.commands.recorder.history import Life, read_history
from penstock.commands.recorder.timeline import make_trace
from penstock.process.failure import fail
from penstock.process.options import format_size
from penstock.shm.memory.ring import RingReader, Stretch
from penstock.shm.recording.file import RecordingError, RecordingWriter, read_recording
from penstock.shm.recording.live import read_last
from penstock.shm.recording.rings import NoRing, open_ring

_EVERY_S = 0.1


def copy_records(
    ring: RingReader, path: Path, seconds: float, *, with_tokens: bool, wait: Callable[[float], object] = time.sleep
) -> int:
    """Record for the given seconds, and across restarts of the backend; return the file's bytes.

    A key interrupt ends it early. Raises OSError.
    """
    with RecordingWriter(path, with_tokens=with_tokens) as file:
        # From the last key plan on, so that the rows of the first steps are known.
        stretch = read_last(ring, 0.0)
        file.write(stretch)
        until_s = time.monotonic() + seconds
        try:
            while (left_s := until_s - time.monotonic()) > 0:
                wait(min(_EVERY_S, left_s))
                stretch = _copy_new(ring, file, stretch.end)
        except KeyboardInterrupt:
            _copy_new(ring, file, stretch.end)
        return file.num_bytes


def _copy_new(ring: RingReader, file: RecordingWriter, begin: int) -> Stretch:
    stretch = ring.read(begin)
    if stretch.records:
        file.write(stretch)
    return stretch


def record(
    file: Path,
    *,
    minutes: Annotated[float, Parameter(validator=Number(gt=0.0, lte=1440.0))] = 1.0,
    pid: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    with_tokens: bool = False,
) -> None:
    """The command; its help is in `penstock.main`.

    Parameters
    ----------
    file
        The file to write, such as out.rec.
    minutes
        How long to record. Ctrl-C ends it earlier.
    pid
        Process id of the server or of its backend. Default: the only one of this user.
    with_tokens
        Record prompts and sampled tokens too, from a server that runs with --record-tokens.
    """
    try:
        ring, started = open_ring(pid)
    except NoRing as error:
        _fail("record", str(error))
    if with_tokens and not started.has_tokens:
        _fail("record", "this server records no tokens; start it with --record-tokens, or leave --with-tokens out")
    try:
        num_bytes = copy_records(ring, file, 60.0 * minutes, with_tokens=with_tokens)
    except OSError as error:
        _fail("record", f"cannot write {file}: {error.strerror}")
    finally:
        ring.close()
    print(f"{file}: {format_size(num_bytes)} of backend {started.pid} ({started.model})")


def timeline(file: Path, *, out: Path | None = None) -> None:
    """The command; its help is in `penstock.main`.

    Parameters
    ----------
    file
        A file of `penstock record`, or of a crash.
    out
        The trace to write. Default: beside the recording, with the suffix .json.
    """
    lives = read_lives("penstock timeline", file)
    path = file.with_suffix(".json") if out is None else out
    if path == file:
        _fail("timeline", f"{file} would be overwritten; give --out another name")
    try:
        path.write_text(json.dumps(make_trace(lives)), encoding="utf-8")
    except OSError as error:
        _fail("timeline", f"cannot write {path}: {error.strerror}")
    num_steps = sum(len(life.steps) for life in lives)
    print(f"{path}: {num_steps} steps of {len(lives)} backends; open it at https://ui.perfetto.dev")


def read_lives(command: str, file: Path) -> list[Life]:
    """Read the lives of a recording. Exits with one line for a file that is not a recording of this version, or has no
    readable records."""
    try:
        recording = read_recording(file)
    except RecordingError as error:
        fail(command, str(error))
    except OSError as error:
        fail(command, f"cannot read {file}: {error.strerror}")
    lives = read_history(recording)
    if recording.problem:
        print(f"{file}: {recording.problem}; what comes before that is read", file=sys.stderr)
    if not lives:
        fail(command, f"{file} has no records")
    if recording.gaps:
        places = f"{len(recording.gaps)} place{'s' if len(recording.gaps) > 1 else ''}"
        print(f"records are missing in {places}: the ring was overwritten before they were read", file=sys.stderr)
    return lives


def _fail(command: str, message: str) -> NoReturn:
    fail(f"penstock {command}", message)
