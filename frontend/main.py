"""The `frontend` command: owns the listening socket and keeps its workers running."""

from __future__ import annotations

import errno
import os
import socket
import sys

import msgspec

from frontend.options import FrontendOptions
from frontend.settings import WORKER_SETTINGS_VARIABLE, Limits, ParserNames, WorkerSettings
from shm.cli import fail, make_app
from shm.supervisor import ChildSpec, Supervisor, module_argv

_BACKLOG = 2048
_LONGEST_SOCKET_PATH_BYTES = 107
_STOP_MARGIN_S = 5.0
"""What a worker may take beyond its drain time-out before it is killed."""

app = make_app("frontend", "Serves the OpenAI API over HTTP for the backend on this machine.")


@app.default
def run(*, options: FrontendOptions = FrontendOptions()) -> None:  # noqa: B008 - frozen; cyclopts reads the defaults from it
    sys.exit(serve(options))


def main() -> None:
    app()


def serve(options: FrontendOptions) -> int:
    """Runs until told to stop; returns the exit status."""
    if len(os.fsencode(options.socket)) > _LONGEST_SOCKET_PATH_BYTES:
        fail("frontend", f"--socket {options.socket} is longer than the {_LONGEST_SOCKET_PATH_BYTES} bytes of a path")
    listening = listening_socket(options, "frontend")
    settings = WorkerSettings(
        listen_fd=listening.fileno(),
        socket_path=str(options.socket),
        api_keys=options.api_key,
        limits=Limits(
            max_body_bytes=options.max_body,
            max_open_requests=options.max_open_requests,
            max_stored_response_bytes=options.response_store,
            keep_alive_interval_s=options.keep_alive_interval_s,
        ),
        drain_timeout_s=options.drain_timeout_s,
        log_level=options.log_level,
        log_json=options.log_json,
        parsers=ParserNames(options.tool_parser, options.reasoning_parser),
    )
    environment = {**os.environ, WORKER_SETTINGS_VARIABLE: msgspec.json.encode(settings).decode()}
    argv = module_argv("frontend.worker")
    workers = [
        ChildSpec(f"worker {number}", argv, pass_fds=(listening.fileno(),), env=environment)
        for number in range(options.workers)
    ]
    if options.listen_fd is None:  # otherwise who handed it over says so
        host, port = listening.getsockname()[:2]
        shown_host = f"[{host}]" if ":" in host else host
        _log(f"listening on http://{shown_host}:{port} with {options.workers} worker(s)")
    supervisor = Supervisor(
        workers,
        log=_log,
        stop_timeout_s=options.drain_timeout_s + _STOP_MARGIN_S,
        # The workers close theirs; as long as one is open, clients connect and wait for nobody.
        on_stop=listening.close,
    )
    return supervisor.run()


def listening_socket(options: FrontendOptions, command: str) -> socket.socket:
    """A socket in which connections wait while workers start or restart: the inherited one, or one of our own.

    Exits with one line, in the name of the command, where it cannot be had.
    """
    if options.listen_fd is not None:
        return _inherited(options.listen_fd, command)
    host, port = options.host, options.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except socket.gaierror:
        fail(command, f'--host "{host}" is not an address of this machine')
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        fail(command, f"port {port} on {host} {reason}")


def _inherited(fd: int, command: str) -> socket.socket:
    try:
        inherited = socket.socket(fileno=fd)
    except OSError as error:
        fail(command, f"--listen-fd {fd} is no socket: {error.strerror}")
    is_listening = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if inherited.family not in (socket.AF_INET, socket.AF_INET6) or not is_listening:
        fail(command, f"--listen-fd {fd} is not a socket that listens on a port")
    return inherited


def _log(message: str) -> None:
    print(f"frontend: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
