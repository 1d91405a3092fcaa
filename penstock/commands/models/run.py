"""`penstock run`: ask a model in the terminal, with a server of its own if none has it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from penstock.backend.model_names import name_in_api
from penstock.commands.terminal_chat import ChatOptions, chat
from penstock.process.children import module_argv, stop_with_parent
from penstock.process.supervisor import exit_status
from penstock.shm.recording.running_servers import running_servers

_READY = "Ready: "
_UNSET = ChatOptions().url


def run(
    model: Annotated[str, Parameter(show_env_var=False)],
    prompt: Annotated[str | None, Parameter(show_env_var=False)] = None,
    /,
    *,
    options: ChatOptions = ChatOptions(),  # noqa: B008 - frozen; cyclopts reads the defaults from it
) -> int:
    """The command; its help is in `penstock.main`.

    Parameters
    ----------
    model
        A name in the API of a server that runs, or a model as --model of penstock serve takes it.
    prompt
        The question. Without one the terminal talks with the model.
    """
    name = name_in_api(model)
    if options.url != _UNSET:
        return chat(prompt, options=replace(options, model=options.model or name))
    for server in running_servers():
        if name in server.models and not server.url.startswith("unix:"):
            return chat(prompt, options=replace(options, url=server.url, model=name))
    with _server_of(model) as url:
        return chat(prompt, options=replace(options, url=url, model=name))


@contextlib.contextmanager
def _server_of(model: str) -> Iterator[str]:
    """Run a server of one model on a free port for as long as the block lasts; yield its address."""
    argv = module_argv("penstock.main", ["serve", model, "--host", "127.0.0.1", "--port", "0", "--log-level", "error"])
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C stops an answer, not the server
        preexec_fn=stop_with_parent,
    )
    try:
        for line in process.stdout or ():
            if line.startswith(_READY):
                yield line.removeprefix(_READY).strip()
                return
        sys.exit(exit_status(process.wait()))  # it has said why
    finally:
        process.terminate()
        process.wait()
