"""The `penstock` command."""

from __future__ import annotations

from penstock.shm.process.garbage_collection import pause_collection, resume_collection, spare_imports

if __name__ == "__main__":
    pause_collection()

import os
import select
import sys
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from penstock.shm.process.failure import fail
from penstock.shm.process.options import ENV_PREFIX, make_app
from penstock.tools.bench.command import app as bench
from penstock.tools.foreign_options import explain
from penstock.tools.serve_options import ServeOptions, one_or_several

_TOP = """Shows what a running server of this user does: requests, steps, pages, tenants and rates.

Keys: a, g, r, p, t and s sort by age, generated tokens, rate, prompt, tenant and state; the space bar pauses; q ends.
With the admin key, j and k choose a request and c cancels it.
"""
_REPLAY = """Sends the requests of a recording through the real scheduler again, and compares both runs.

Time is simulated: a step takes as long as steps of so many tokens took in the recording. Exit status 1 says that
tokens differ.
"""

app = make_app(
    "penstock", "An LLM server for one GPU: serve a model, measure it, or write one with random weights.", explain
)


@app.command
def serve(
    model: Annotated[str | None, Parameter(show_env_var=False, show_default=False)] = None,
    /,
    *,
    options: ServeOptions = ServeOptions(),  # noqa: B008 - frozen; cyclopts reads the defaults from it
) -> None:
    """Serves a model over HTTP: runs backend and frontend, restarts them when they die, drains them when stopped.

    Parameters
    ----------
    model
        The same as --model.
    """
    from penstock.tools import serve as module

    from_environment = os.environ.get(f"{ENV_PREFIX}MODEL")  # cyclopts reads it for the argument
    if model not in (None, from_environment) and options.models:
        fail("penstock serve", f"the model is given twice: {model} and --model {options.models[0]}")
    if not options.models and model is not None:
        options = replace(options, models=(model,))
    sys.exit(module.serve(one_or_several(options)))


app.command(bench)


# It parses its own options, because it also runs where the packages of this command line are not installed.
@app.command(name="gpu-check", help_flags=[], version_flags=[])
def gpu_check(*options: Annotated[str, Parameter(allow_leading_hyphen=True, show_env_var=False)]) -> None:
    """Checks and measures the CUDA decoder on this machine's GPU."""
    from penstock.tools.gpu_check.__main__ import main as run

    sys.exit(run(list(options)))


# By name: its module imports torch, which would delay the other commands.
app.command(
    "penstock.tools.random_model:run_random_model", name="random-model", help="Writes a checkpoint of random weights."
)


# By name: its module imports torch and the tokenizer.
app.command(
    "penstock.tools.inspect_model.command:inspect_model",
    name="inspect",
    help="Says what a model is, and whether it can be served, without loading its weights.",
)


app.command(
    "penstock.tools.compile_kernels:compile_kernels",
    name="compile-kernels",
    help="Compiles the CPU kernels for every CPU of this machine's architecture, for an image without a compiler.",
)


# By name: its modules import torch.
app.command(
    "penstock.tools.doctor.command:doctor",
    name="doctor",
    help="Examines this machine: what keeps the server from running well, and what to do about it.",
)


# By name: it imports an HTTP client.
app.command("penstock.tools.terminal_chat:chat", name="chat", help="Talks with a model in the terminal.")


# By name: its modules import the whole server.
app.command(
    "penstock.tools.chaos.command:chaos",
    name="chaos",
    help="Attacks a server with clients and processes that die, and checks that nothing is lost.",
)


# By name: its modules are of no use to the other commands. It passes the options on to the server, which checks them.
app.command(
    "penstock.tools.upgrade.command:upgrade",
    name="upgrade",
    help="Replaces the backends of a running `penstock serve`: by ones with the installed code, and with the options "
    "given here changed. Streams go on.",
    version_flags=[],
)


# By name: it imports the server's options; Ray itself only when it is used.
app.command(
    "penstock.tools.fleet.command:app",
    name="ray",
    help="Runs servers on the nodes of a Ray cluster, one on each, behind HAProxy or nginx.",
)


app.register_install_completion_command(help="Writes the completion of this command for your shell, and says where.")
# By name: these modules are of no use to the other commands.
app.command(
    "penstock.tools.recorder.command:record",
    name="record",
    help="Records what the loop of a running server plans and computes, from now on, into a new file.",
)
app.command(
    "penstock.tools.recorder.command:timeline",
    name="timeline",
    help="Writes a recording, or what is left of a crash, as a trace for https://ui.perfetto.dev.",
)
app.command(
    "penstock.tools.recorder.replay.command:replay",
    name="replay",
    help=_REPLAY,
)
app.command("penstock.tools.top.command:top", name="top", help=_TOP)


def main() -> None:
    spare_imports()
    resume_collection()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone(sys.stdout.fileno()):
            raise  # it is about another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit finds a reader
        sys.exit(1)


def _reader_is_gone(fd: int) -> bool:
    """Whether fd is a pipe that nobody reads any more, as behind `| head`."""
    poll = select.poll()
    poll.register(fd, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


if __name__ == "__main__":
    main()
