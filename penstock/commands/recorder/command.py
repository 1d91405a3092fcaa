"""`penstock record` and `penstock timeline`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.commands.recorder.history import Life, read_history
from penstock.commands.recorder.record import record as copy_records
from penstock.commands.recorder.timeline import make_trace
from penstock.process.failure import fail
from penstock.process.options import format_size
from penstock.shm.recording.file import RecordingError, read_recording
from penstock.shm.recording.rings import NoRing, open_ring


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
