"""`penstock replay`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from rich.console import Console

from penstock.backend.engine.steps.launched_step import launch_step
from penstock.backend.errors import StartupError
from penstock.backend.options import BackendOptions
from penstock.commands.recorder.command import read_lives
from penstock.commands.recorder.history import Life, read_history
from penstock.process.failure import fail
from penstock.shm.memory.ring import Stretch
from penstock.shm.messages import PROTOCOL_VERSION
from penstock.shm.recording.events import Arrived, BackendStarted
from penstock.shm.recording.file import Recording, RecordingError, RecordingWriter
from penstock.shm.recording.records import unpack
from penstock.tools.replay.arrivals import Arrivals
from penstock.tools.replay.backend import VECTOR_WIDTHS, MadeUpSteps, ReplayedBackend, ReplayedPass
from penstock.tools.replay.comparison import Account, compare_tokens, comparison_table
from penstock.tools.replay.sizes import check_sizes
from penstock.tools.replay.step_times import StepTimes

_COMMAND = "penstock replay"
_MAX_NAMED = 8


def replay(
    file: Path,
    *,
    with_tokens: bool = False,
    out: Path | None = None,
    options: BackendOptions = BackendOptions(),  # noqa: B008 - frozen; cyclopts reads the defaults from it
) -> None:
    """The command; its help is in `penstock.main`.

    Parameters
    ----------
    file
        A file of `penstock record`, or of a crash.
    with_tokens
        Run the recorded prompts through the forward pass too, and compare the tokens. The recording must have tokens.
        The model and the options that change its tokens are given as to `penstock serve`; sizes of the cache and of
        steps are the recording's.
    out
        Write the replay as a recording with this name, for `penstock timeline`.
    """
    if out is not None and out.exists():
        fail(_COMMAND, f"{out} exists already; give --out another name")
    lives = read_lives(_COMMAND, file)
    life = max(lives, key=lambda life: sum(isinstance(event, Arrived) for _, event in life.events))
    console = Console()
    try:
        stretch, arrivals, started = run_replay(life, options, with_tokens=with_tokens)
        if out is not None:
            with RecordingWriter(out, with_tokens=with_tokens) as writer:
                writer.write(stretch)
    except (RecordingError, StartupError) as error:
        fail(_COMMAND, str(error))
    except OSError as error:
        fail(_COMMAND, f"{error.filename}: {error.strerror}")
    if len(lives) > 1:
        print(f"the recording has {len(lives)} backends; this is process {started.pid}, to which most requests came")
    (replayed_life,) = read_history(Recording([unpack(record) for record in stretch.records]))
    recorded, replayed = Account.of(life), Account.of(replayed_life)
    console.print(comparison_table(recorded, replayed))
    for reason, count in arrivals.left_out.items():
        print(f"left out: {count} requests that {reason}")
    if with_tokens:
        sys.exit(_report_tokens(recorded, replayed))


def run_replay(life: Life, options: BackendOptions, *, with_tokens: bool) -> tuple[Stretch, Arrivals, BackendStarted]:
    """Replay one life. Raises RecordingError and StartupError."""
    started = life.started
    if started is None:
        raise RecordingError("the recording does not say which backend it is of")
    check_sizes(started)
    if with_tokens and started.has_tokens and started.protocol_version != PROTOCOL_VERSION:
        raise RecordingError(
            f"its prompts are messages of protocol {started.protocol_version}; this version of Penstock reads protocol "
            f"{PROTOCOL_VERSION}, so replay it without --with-tokens"
        )
    if with_tokens and not life.prompts:
        raise RecordingError(
            "it has no tokens; record with --with-tokens, from a server that runs with --record-tokens"
        )
    step_times, arrivals = StepTimes(life), Arrivals(life, started, from_prompts=with_tokens)
    if not with_tokens:
        made_up = ReplayedPass(MadeUpSteps(arrivals).launch, VECTOR_WIDTHS)
        return ReplayedBackend(started, arrivals, step_times, made_up, with_tokens=False).run(), arrivals, started
    from penstock.tools.replay.model import load_pass  # imports torch

    forward_pass, compiler = load_pass(options, started)
    try:
        launch = partial(launch_step, forward_pass)  # masks are made at once, so none is late
        replayed_pass = ReplayedPass(launch, {}, compiler, forward_pass.spec.scores_prompts)
        stretch = ReplayedBackend(started, arrivals, step_times, replayed_pass, with_tokens=True).run()
    finally:
        if compiler is not None:
            compiler.close()
        forward_pass.close()
    return stretch, arrivals, started


def _report_tokens(recorded: Account, replayed: Account) -> int:
    """Return the exit status."""
    compared = compare_tokens(recorded, replayed)
    if recorded.num_incomplete:
        print(f"not compared: {recorded.num_incomplete} requests of whose tokens records are missing")
    if not (compared.num_same or compared.different):
        fail(_COMMAND, "no request has finished with all its tokens recorded, so there is nothing to compare")
    print(f"{compared.num_same:,} of {compared.num_same + len(compared.different):,} requests have the same tokens")
    if not compared.different:
        return 0
    named = compared.different[:_MAX_NAMED]
    names = ", ".join(f"{request_id} of frontend {frontend}" for frontend, request_id in named)
    print(f"other tokens: request {names}{', …' if len(compared.different) > len(named) else ''}")
    return 1
