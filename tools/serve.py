"""`penstock serve`: backend and frontend as children of one supervisor."""

from __future__ import annotations

import dataclasses
import http.client
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from cyclopts import Parameter

from backend.options import BackendOptions
from frontend.options import FrontendOptions
from shm.cli import ENV_PREFIX, default_socket_path, to_argv
from shm.supervisor import ChildSpec, Supervisor, module_argv

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

    socket: Path = field(default_factory=private_socket_path)
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


def free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        port: int = listener.getsockname()[1]
        return port


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
    if options.port == 0:
        # Chosen here, so that a frontend that is restarted comes back on the same one.
        options = dataclasses.replace(options, port=free_port(options.host))
    told, environment = split_keys(options)
    backend_argv = module_argv("backend.main", to_argv(part(told, BackendOptions)))
    frontend_argv = module_argv("frontend.main", to_argv(part(told, FrontendOptions)))
    children = (
        ChildSpec("backend", backend_argv, stage=0),
        ChildSpec("frontend", frontend_argv, env=environment, stage=1),
    )

    def announce_when_up() -> bool:
        if not is_ready(options.host, options.port):
            return False
        print(_welcome(options), flush=True)
        return True

    stop_timeout_s = options.drain_timeout_s + _STOP_MARGIN_S
    try:
        return Supervisor(children, log=_log, stop_timeout_s=stop_timeout_s, is_up=announce_when_up).run()
    finally:
        if options.socket == private_socket_path():
            for path in options.socket.parent.glob(f"{options.socket.name}*"):  # the socket and its lock
                path.unlink(missing_ok=True)


def _log(message: str) -> None:
    print(f"penstock serve: {message}", file=sys.stderr, flush=True)


def _welcome(options: ServeOptions) -> str:
    host = _ANY_ADDRESS.get(options.host, options.host)
    url = f"http://[{host}]:{options.port}" if ":" in host else f"http://{host}:{options.port}"
    key = ' -H "Authorization: Bearer $KEY"' if options.api_key else ""
    return (
        f"Ready: {url}/v1\n"
        f"  curl {url}/v1/completions{key} -H 'Content-Type: application/json' "
        """-d '{"prompt": "Once upon a time", "max_tokens": 32}'"""
    )
