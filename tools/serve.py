"""`penstock serve`: backend and frontend as children of one supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from cyclopts import Parameter

from backend.options import BackendOptions
from frontend.main import listening_socket
from frontend.options import FrontendOptions
from shm.cli import ENV_PREFIX, default_socket_path, fail, to_argv
from shm.rendezvous import AddressInUse, CannotListen, check_free
from shm.supervisor import ChildSpec, Supervisor, module_argv

_COMMAND = "penstock serve"
_STOP_MARGIN_S = 10.0
"""What a child may take beyond the drain time-out before it is killed."""
_PROBE_TIMEOUT_S = 0.5

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - where to ask, not where to listen


def private_socket_path() -> Path:
    """One for each `penstock serve`, so that two never share a backend."""
    return default_socket_path().with_name(f"serve-{os.getpid()}.sock")


@Parameter(name="*")
@dataclass(frozen=True)
class ServeOptions(FrontendOptions, BackendOptions):
    """Backend and frontend together: all options of both."""

    socket: Annotated[Path, Parameter(show_default=False)] = field(default_factory=private_socket_path)
    """Unix socket between the two. Default: one of this server's own."""


# The inherited fields' annotations are names of their own modules; whoever inspects __init__ would look for them here.
ServeOptions.__init__.__annotations__ = get_type_hints(ServeOptions, include_extras=True)

T = TypeVar("T")


def part(options: Any, of: type[T]) -> T:
    """The values of options for the fields of a dataclass it inherits from."""
    return of(**{item.name: getattr(options, item.name) for item in dataclasses.fields(of)})  # type: ignore[arg-type]


def is_ready(host: str, port: int) -> bool:
    """True where GET /ready answers 200 now."""
    connection = http.client.HTTPConnection(_ANY_ADDRESS.get(host, host), port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def split_keys(options: ServeOptions) -> tuple[ServeOptions, dict[str, str]]:
    """The options without API keys, and an environment with them: other users of a machine can read command lines."""
    environment = dict(os.environ)
    if options.api_key:
        environment[f"{ENV_PREFIX}API_KEY"] = ",".join(options.api_key)
    return dataclasses.replace(options, api_key=()), environment


def serve(options: ServeOptions) -> int:
    """Runs until told to stop; returns the exit status. A dry run is the backend's alone."""
    if options.dry_run:
        return subprocess.run(
            module_argv("backend.main", to_argv(part(options, BackendOptions))), check=False
        ).returncode
    with listening_socket(options, _COMMAND) as listening, _backend_socket(options.socket):
        return _supervise(options, listening)


@contextlib.contextmanager
def _backend_socket(path: Path) -> Iterator[None]:
    """Exits with one line where another backend has it. One of this server's own leaves no files behind."""
    is_private = path == private_socket_path()
    try:
        check_free(path)
        if is_private:
            _remove_leftovers(path.parent)
        yield
    except CannotListen as error:
        fail(_COMMAND, str(error))
    finally:
        if is_private:
            _remove_socket(path)


def _remove_leftovers(directory: Path) -> None:
    """The sockets of servers that were killed."""
    for lock in directory.glob("serve-*.sock.lock"):
        path = lock.with_suffix("")
        if not Path("/proc", path.stem.removeprefix("serve-")).exists():
            with contextlib.suppress(AddressInUse):  # its backend lives for a moment longer than the server
                check_free(path)
                _remove_socket(path)


def _remove_socket(path: Path) -> None:
    for name in ("", ".zmq", ".lock"):  # the lock last: by it what is left over is found
        path.with_name(path.name + name).unlink(missing_ok=True)


def _supervise(options: ServeOptions, listening: socket.socket) -> int:
    """The frontend takes over the socket that listens: whoever answers there is ours, also where it is restarted."""
    host, port = listening.getsockname()[:2]
    told, environment = split_keys(dataclasses.replace(options, listen_fd=listening.fileno()))
    backend_argv = module_argv("backend.main", to_argv(part(told, BackendOptions)))
    frontend_argv = module_argv("frontend.main", to_argv(part(told, FrontendOptions)))
    children = (
        ChildSpec("backend", backend_argv, stage=0),
        ChildSpec("frontend", frontend_argv, pass_fds=(listening.fileno(),), env=environment, stage=1),
    )

    def announce_when_up() -> bool:
        if not is_ready(host, port):
            return False
        print(_welcome(dataclasses.replace(options, port=port)), flush=True)
        return True

    return Supervisor(
        children,
        log=_log,
        stop_timeout_s=options.drain_timeout_s + _STOP_MARGIN_S,
        is_up=announce_when_up,
        # The frontend closes its own; as long as one is open, clients connect and wait for nobody.
        on_stop=listening.close,
    ).run()


def _log(message: str) -> None:
    print(f"{_COMMAND}: {message}", file=sys.stderr, flush=True)


def _welcome(options: ServeOptions) -> str:
    host = _ANY_ADDRESS.get(options.host, options.host)
    url = f"http://[{host}]:{options.port}" if ":" in host else f"http://{host}:{options.port}"
    key = ' -H "Authorization: Bearer $KEY"' if options.api_key else ""
    return (
        f"Ready: {url}/v1\n"
        f"  curl {url}/v1/completions{key} -H 'Content-Type: application/json' "
        """-d '{"prompt": "Once upon a time", "max_tokens": 32}'"""
    )
