"""`penstock serve`: backend and frontend as children of one supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.backend.options import BackendOptions
from penstock.frontend.main import listening_socket, read_access, reloads, tls_files, without_secrets
from penstock.frontend.options import FrontendOptions
from penstock.frontend.transport.serving.listening import address_of, unlink
from penstock.shm.link.listening_address import AddressInUse, CannotListen, check_free
from penstock.shm.process.heartbeat import Heartbeat
from penstock.shm.process.options import ENV_PREFIX, fail, to_argv
from penstock.shm.process.socket_path import default_socket_path
from penstock.shm.process.supervisor import ChildSpec, Supervisor, module_argv
from penstock.tools.welcome import Welcome

_COMMAND = "penstock serve"
_STOP_MARGIN_S = 10.0
"""Time that a child gets beyond the drain timeout before it is killed."""
_PROBE_TIMEOUT_S = 0.5

_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - compared, not listened on


def private_socket_path() -> Path:
    """A path of this process's own, so that two servers never share a backend."""
    return default_socket_path().with_name(f"serve-{os.getpid()}.sock")


@Parameter(name="*")
@dataclass(frozen=True)
class ServeOptions(FrontendOptions, BackendOptions):
    """All options of backend and frontend."""

    socket: Annotated[Path, Parameter(show_default=False)] = field(default_factory=private_socket_path)
    """Unix socket between backend and frontend. Default: one that belongs to this server alone."""

    hang_timeout_s: Annotated[float, Parameter(validator=Number(gte=0.0, lte=86_400.0))] = 30.0
    """Seconds after which a backend whose loop stands still is killed and replaced; 0 is never. A start does not count,
    nor does a long step of the device."""


# Inherited annotations name types of the modules that declare them; cyclopts would look for the names in this one.
ServeOptions.__init__.__annotations__ = get_type_hints(ServeOptions, include_extras=True)

T = TypeVar("T")


def select_options(options: Any, of: type[T]) -> T:
    """Return options as the dataclass `of`, from which its class inherits."""
    return of(**{item.name: getattr(options, item.name) for item in dataclasses.fields(of)})  # type: ignore[arg-type]


class _Probe(http.client.HTTPConnection):
    """A connection to our own listening socket, TCP or Unix. It does not check the certificate, which is ours."""

    def __init__(self, listening: socket.socket, *, tls: bool) -> None:
        super().__init__("localhost", timeout=_PROBE_TIMEOUT_S)
        self._family, self._address = listening.family, listening.getsockname()
        self._tls = tls

    def connect(self) -> None:
        self.sock = socket.socket(self._family)
        self.sock.settimeout(_PROBE_TIMEOUT_S)
        address = self._address
        if self._family != socket.AF_UNIX:
            address = (_LOOPBACK_OF.get(address[0], address[0]), *address[1:])
        self.sock.connect(address)
        if self._tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self.sock = context.wrap_socket(self.sock)


def is_ready(listening: socket.socket, *, tls: bool) -> bool:
    """Return whether GET /ready answers 200 now."""
    connection = _Probe(listening, tls=tls)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def split_keys(options: ServeOptions) -> tuple[ServeOptions, dict[str, str]]:
    """Return the options without secrets, and an environment that holds the secrets.

    Other users of the machine can read command lines, but not environments.
    """
    environment = dict(os.environ)
    if options.api_key:
        environment[f"{ENV_PREFIX}API_KEY"] = ",".join(options.api_key)
    if options.ssl_keyfile_password is not None:
        environment[f"{ENV_PREFIX}SSL_KEYFILE_PASSWORD"] = options.ssl_keyfile_password
    return dataclasses.replace(options, api_key=(), ssl_keyfile_password=None), environment


def serve(options: ServeOptions) -> int:
    """Run until a signal stops it; return the exit status. A dry run starts only the backend."""
    if options.dry_run:
        return subprocess.run(
            module_argv("penstock.backend.main", to_argv(select_options(options, BackendOptions))), check=False
        ).returncode
    read_access(options, _COMMAND)
    tls_files(options, _COMMAND)
    with listening_socket(options, _COMMAND) as listening, _backend_socket(options.socket):
        return _supervise(options, listening)


@contextlib.contextmanager
def _backend_socket(path: Path) -> Iterator[None]:
    """Hold the backend's socket path. Exits with one line if another backend serves it.

    A private path leaves no files behind.
    """
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
    """Remove the sockets of servers that were killed."""
    for lock in directory.glob("serve-*.sock.lock"):
        path = lock.with_suffix("")
        if not Path("/proc", path.stem.removeprefix("serve-")).exists():
            with contextlib.suppress(AddressInUse):  # its backend outlives the server for a moment
                check_free(path)
                _remove_socket(path)


def _remove_socket(path: Path) -> None:
    for name in ("", ".lock"):  # the lock last: leftovers are found by it
        path.with_name(path.name + name).unlink(missing_ok=True)


def _supervise(options: ServeOptions, listening: socket.socket) -> int:
    """Run both children. The frontend inherits the listening socket, so a restarted one answers at the same address."""
    tls = options.ssl_certfile is not None
    has_keys = bool(options.api_key or options.api_key_file)
    welcome = Welcome(address_of(listening, tls=tls), options.model_id(), tls, has_keys)
    heartbeat = Heartbeat.create()
    public_options, environment = split_keys(
        dataclasses.replace(options, listen_fd=listening.fileno(), heartbeat_fd=heartbeat.fd)
    )
    backend_argv = module_argv("penstock.backend.main", to_argv(select_options(public_options, BackendOptions)))
    frontend_argv = module_argv("penstock.frontend.main", to_argv(select_options(public_options, FrontendOptions)))
    fds = (listening.fileno(),)
    children = (
        ChildSpec(
            "backend",
            backend_argv,
            (heartbeat.fd,),
            without_secrets(os.environ),
            stage=0,
            heartbeat=heartbeat,
            hang_timeout_s=options.hang_timeout_s,
        ),
        ChildSpec("frontend", frontend_argv, fds, environment, stage=1, reloads=reloads(options)),
    )

    def announce_when_up() -> bool:
        if not is_ready(listening, tls=tls):
            return False
        print(welcome.ready_line(), flush=True)
        if not options.log_json:
            print(f"\n{welcome.examples()}\n", flush=True)
        return True

    def close() -> None:
        unlink(listening)
        listening.close()

    return Supervisor(
        children,
        log=_log,
        stop_timeout_s=options.drain_timeout_s + _STOP_MARGIN_S,
        is_up=announce_when_up,
        # The frontend closes its copy too; while any copy is open, clients connect and nobody answers.
        on_stop=close,
    ).run()


def _log(message: str) -> None:
    print(f"{_COMMAND}: {message}", file=sys.stderr, flush=True)
