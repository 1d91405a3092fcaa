"""`penstock upgrade`: replace the backends of a running server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.process.failure import fail
from penstock.process.private_directory import default_socket_path
from penstock.serve.upgrade.control import SUFFIX, CannotUpgrade, ask

_COMMAND = "penstock upgrade"


def upgrade(
    *options: Annotated[str, Parameter(allow_leading_hyphen=True, show_env_var=False)],
) -> None:
    """The command; its help is in `penstock.main`.

    Parameters
    ----------
    options
        Options of the backend that change, such as --max-running 32. Before them --server SOCKET names the server's
        --socket, if it has one or several servers run.
    """
    words = list(options)
    if words[:1] == ["--server"]:
        if len(words) < 2:
            fail(_COMMAND, "--server requires the path of a socket")
        path = Path(words[1]).with_suffix(SUFFIX)
        words = words[2:]
    else:
        path = _only_server()
    try:
        sys.exit(ask(path, words, lambda line: print(f"{_COMMAND}: {line}", flush=True)))
    except CannotUpgrade as error:
        fail(_COMMAND, str(error))


def _only_server() -> Path:
    """The control socket of this user's only server. Exits with one line if there are none or several."""
    directory = default_socket_path().parent
    paths = sorted(directory.glob(f"serve-*{SUFFIX}"))
    found = [path for path in paths if Path("/proc", path.stem.removeprefix("serve-")).exists()]
    if not found:
        fail(_COMMAND, f"no server runs in {directory}; name one that has a --socket with --server SOCKET")
    if len(found) > 1:
        names = ", ".join(os.fspath(path.with_suffix(".sock")) for path in found)
        fail(_COMMAND, f"several servers run; choose one with --server SOCKET: {names}")
    return found[0]
