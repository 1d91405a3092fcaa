"""The `frontend` command: opens the listening socket and supervises the workers."""

from __future__ import annotations

from penstock.process.garbage_collection import pause_collection, resume_collection, spare_imports

if __name__ == "__main__":
    pause_collection()

import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.frontend.access.api_keys import ApiKey, Keyring, named_keys, read_key_file
from penstock.frontend.access.hosts import serves_one_machine
from penstock.frontend.access.usage_table import UsageTable
from penstock.frontend.endpoints.responses.storage.state_files import (
    NO_STATE,
    StateError,
    StateFiles,
    default_state_dir,
    max_file_bytes,
)
from penstock.frontend.options import FrontendOptions
from penstock.frontend.settings import (
    WORKER_SETTINGS_VARIABLE,
    AccessSettings,
    ModelSocket,
    TracingSettings,
    WorkerLimits,
    WorkerSettings,
)
from penstock.frontend.telemetry.tracing import TracingUnavailable, otlp_exporter
from penstock.frontend.transport.serving.accept_table import AcceptTable
from penstock.frontend.transport.serving.listening import (
    MAX_SOCKET_PATH_BYTES,
    address_of,
    inherited_socket,
    tcp_socket,
    unix_socket,
    unlink,
)
from penstock.frontend.transport.serving.tls import ServerTls, TlsError, TlsFiles
from penstock.process.children import module_argv
from penstock.process.failure import fail
from penstock.process.options import ENV_PREFIX, make_app
from penstock.process.private_directory import Trust, UnsafeDirectory, check_directory
from penstock.process.service_manager import activated_fd, find_service_manager
from penstock.process.supervisor import ChildSpec, Supervisor
from penstock.shm.memory.model_table import MAX_MODELS
from penstock.shm.memory.prefix_table import MAX_REPLICAS, PrefixTable

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")
"""An origin as browsers write it: in lower case, without a path."""
_SECRETS = (f"{ENV_PREFIX}API_KEY", f"{ENV_PREFIX}ADMIN_KEY", f"{ENV_PREFIX}SSL_KEYFILE_PASSWORD")
_STOP_MARGIN_S = 5.0
"""How long a worker may take beyond its drain timeout before it is killed."""

app = make_app("frontend", "Serve the OpenAI API over HTTP for the backend on this machine.")


@app.default
def run(*, options: FrontendOptions = FrontendOptions()) -> None:  # noqa: B008 - frozen; cyclopts reads the defaults from it
    sys.exit(serve(options))


def main() -> None:
    spare_imports()
    resume_collection()
    app()


def serve(options: FrontendOptions) -> int:
    """Run until told to stop; return the exit status."""
    main_socket, models = _backend_sockets(options)
    access, tls = read_access(options, "frontend"), tls_files(options, "frontend")
    check_chat_template(options.chat_template, "frontend")
    listening = listening_socket(options, "frontend")
    if options.listen_fd is None and (warning := open_to_everyone(access, listening)) is not None:
        _log(warning)
    state = state_files(options, listening)
    settings = WorkerSettings(
        worker=0,
        num_workers=options.workers,
        listen_fd=listening.fileno(),
        accept_fd=AcceptTable.create_fd(options.workers),
        socket_path=str(main_socket),
        replica_socket_paths=tuple(str(path) for path in options.replica_socket),
        replica_dir=_text(options.replica_dir),
        prefixes_fd=_prefixes_fd(options),
        model_sockets=models,
        models_fd=-1 if options.models_fd is None else options.models_fd,
        embedding_socket_path=_text(options.embedding_socket),
        rerank_socket_path=_text(options.rerank_socket),
        access=msgspec.structs.replace(access, usage_fd=UsageTable.create_fd(options.workers)),
        tls=tls,
        limits=_limits(options, state),
        drain_timeout_s=options.drain_timeout_s,
        resume_timeout_s=options.resume_timeout_s,
        log_level=options.log_level,
        log_json=options.log_json,
        tracing=_tracing(options),
        parsers=options.parsers(),
        id_mark="" if options.server_number is None else f"{options.server_number:04x}",
        starts_alone=options.listen_fd is None,
        chat_template_path=_text(options.chat_template),
    )
    manager = find_service_manager("frontend")
    workers = [_worker(settings, number, options) for number in range(options.workers)]
    if options.listen_fd is None:  # otherwise the process that handed the socket over prints it
        address = address_of(listening, tls=tls is not None)
        _log(f"listening on {address} with {options.workers} worker(s)")

    def close() -> None:
        unlink(listening)
        listening.close()

    supervisor = Supervisor(
        workers,
        log=_log,
        stop_timeout_s=options.drain_timeout_s + _STOP_MARGIN_S,
        # The workers close theirs. While any copy is open, clients can connect to a server that never answers.
        on_stop=close,
        service_manager=manager,
    )
    try:
        return supervisor.run()
    finally:
        if state is not None:
            state.close()


def _worker(settings: WorkerSettings, number: int, options: FrontendOptions) -> ChildSpec:
    encoded = msgspec.json.encode(msgspec.structs.replace(settings, worker=number))  # with the secrets
    return ChildSpec(
        f"worker {number}",
        module_argv("penstock.frontend.worker"),
        pass_fds=tuple(fd for fd in _passed_fds(settings) if fd >= 0),
        env=without_secrets(os.environ) | {WORKER_SETTINGS_VARIABLE: encoded.decode()},
        reloads=reloads(options),
    )


def _passed_fds(settings: WorkerSettings) -> tuple[int, ...]:
    return settings.listen_fd, settings.access.usage_fd, settings.accept_fd, settings.prefixes_fd, settings.models_fd


def _tracing(options: FrontendOptions) -> TracingSettings | None:
    """Return the settings; None without tracing. Exits with one line if they are unusable."""
    if options.otlp_endpoint is None:
        return None
    if not options.otlp_endpoint.startswith(("http://", "https://")):
        fail(
            "frontend", f'--otlp-endpoint is "{options.otlp_endpoint}"; write a URL, as http://127.0.0.1:4318/v1/traces'
        )
    try:
        otlp_exporter(options.otlp_endpoint).shutdown()
    except TracingUnavailable as error:
        fail("frontend", str(error))
    return TracingSettings(options.otlp_endpoint, options.trace_sample_ratio)


def _limits(options: FrontendOptions, state: StateFiles | None) -> WorkerLimits:
    return WorkerLimits(
        max_body_bytes=options.max_body,
        remote_image_hosts=options.allow_remote_images,
        max_open_requests=options.max_open_requests,
        max_stored_response_bytes=options.response_store,
        response_database=_database(options, state),
        max_response_file_bytes=max_file_bytes(options.response_store, options.workers),
        keep_alive_interval_s=options.keep_alive_interval_s,
        hold_timeout_s=options.hold_timeout_s,
        max_held_requests=options.max_held_requests,
        max_linger_s=options.max_linger_s,
        refuses_unknown_fields=options.strict,
    )


def state_files(options: FrontendOptions, listening: socket.socket) -> StateFiles | None:
    """Return where this server keeps responses; None for the memory of each worker."""
    if options.state_dir == NO_STATE or not options.response_store:
        return None
    is_passing = options.port == 0 and listening.family != socket.AF_UNIX
    return StateFiles(options.state_dir, listening, is_passing=is_passing)


def _database(options: FrontendOptions, state: StateFiles | None) -> str | None:
    """Return the path of the responses' database. Without one that was asked for, exits with one line."""
    in_memory = "responses are kept in the memory of the worker that made them"
    if state is not None:
        try:
            return str(state.prepare(max_file_bytes(options.response_store, options.workers), _log))
        except StateError as error:
            if options.state_dir != default_state_dir():
                fail("frontend", f"--state-dir: {error}")
            in_memory = f"{in_memory}: {error}"
    if options.response_store and (state is not None or options.workers > 1):
        _log(in_memory)
    return None


def check_backend_socket(option: str, socket_path: Path | None) -> None:
    """Exit with one line if the path is too long, or if another user could replace the backend's socket.

    A missing directory will be created by the backend.
    """
    if socket_path is None:
        return
    num_path_bytes = len(os.fsencode(socket_path))
    if num_path_bytes > MAX_SOCKET_PATH_BYTES:
        fail("frontend", f"{option} {socket_path} is {num_path_bytes} bytes long; the limit is {MAX_SOCKET_PATH_BYTES}")
    try:
        check_directory(socket_path.parent, Trust.PRIVATE, create=False)
    except FileNotFoundError:
        return
    except UnsafeDirectory as error:
        fail("frontend", f"{option} {socket_path}: {error}")
    except OSError as error:
        fail("frontend", f"{option} {socket_path} cannot be used: {error.strerror}")


def _backend_sockets(options: FrontendOptions) -> tuple[Path, tuple[ModelSocket, ...]]:
    """Return the main backend's socket and those of several models. Exits with one line if any socket is unusable."""
    main_socket = _main_socket(options)
    check_replica_sockets(options)
    models = model_sockets(options)
    check_backend_socket("--embedding-socket", options.embedding_socket)
    check_backend_socket("--rerank-socket", options.rerank_socket)
    return main_socket, models


def _main_socket(options: FrontendOptions) -> Path:
    """Return the backend's socket; in a directory of sockets, one that may appear.

    Exits with one line for an unusable path, and for options that name backends outside the directory.
    """
    if options.replica_dir is None:
        check_backend_socket("--socket", options.socket)
        return options.socket
    for option, value in (("--replica-socket", options.replica_socket), ("--model-socket", options.model_socket)):
        if value:
            fail("frontend", f"{option} and --replica-dir exclude each other: the directory has all backends")
    from penstock.shm.client.replicas.socket_directory import FIRST_NAME  # and the client, which only workers need

    path = options.replica_dir / FIRST_NAME
    check_backend_socket("--replica-dir", path)
    return path


def _prefixes_fd(options: FrontendOptions) -> int:
    has_replicas = options.replica_socket or options.replica_dir is not None
    return PrefixTable.create_fd(secrets.token_bytes(32)) if has_replicas else -1


def check_replica_sockets(options: FrontendOptions) -> None:
    """Exit with one line if a path is unusable or named twice: a backend is not its own replica."""
    paths = (options.socket, *options.replica_socket)
    if len(paths) > MAX_REPLICAS:
        fail("frontend", f"--replica-socket is given {len(paths) - 1} times; the limit is {MAX_REPLICAS - 1}")
    for path in options.replica_socket:
        if paths.count(path) > 1:
            fail("frontend", f"--replica-socket {path} is named twice, or is that of --socket")
        check_backend_socket("--replica-socket", path)


def model_sockets(options: FrontendOptions) -> tuple[ModelSocket, ...]:
    """Return the backends of several models.

    Exits with one line for an unusable path, for a name or path that is given twice, and for options that a server with
    several models lacks.
    """
    models = []
    for text in options.model_socket:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            fail("frontend", f"--model-socket {text} is not NAME=PATH")
        check_backend_socket("--model-socket", Path(path))
        models.append(ModelSocket(name, path))
    if len(models) > MAX_MODELS:
        fail("frontend", f"--model-socket is given {len(models)} times; the limit is {MAX_MODELS}")
    for given in ("name", "path"):
        values = [getattr(model, given) for model in models]
        for value in values:
            if values.count(value) > 1:
                fail("frontend", f"--model-socket: the {given} {value} is given twice")
    others = (
        ("--replica-socket", options.replica_socket),
        ("--embedding-socket", options.embedding_socket),
        ("--rerank-socket", options.rerank_socket),
        ("--chat-template", options.chat_template),
    )
    for option, value in others:
        if models and value:
            fail("frontend", f"{option} and --model-socket exclude each other: the requests' model chooses the backend")
    return tuple(models)


def listening_socket(options: FrontendOptions, command: str) -> socket.socket:
    """Return the socket that a service manager opened, or else the one that the options name: inherited, Unix or TCP.

    Connections wait in it while workers start or restart. A Unix socket's file must be removed by `unlink`. On failure
    exits with one line that begins with the command.
    """
    listen_fd = activated_fd(command) if options.listen_fd is None else options.listen_fd
    if listen_fd is not None:
        return inherited_socket(listen_fd, command)
    if options.uds is not None:
        return unix_socket(options.uds, int(options.uds_mode, 8), command)
    return tcp_socket(options.host, options.port, command)


def read_access(options: FrontendOptions, command: str) -> AccessSettings:
    """Return the access settings for workers. Exits with one line that begins with the command if they are unusable."""
    try:
        keys = named_keys(options.api_key)
        own_key = [] if options.admin_key is None else [ApiKey(options.admin_key.encode(), "admin")]
        Keyring(keys + own_key + (read_key_file(options.api_key_file) if options.api_key_file is not None else []))
    except ValueError as error:
        fail(command, str(error))
    for origin in options.cors_allow_origin:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            fail(
                command,
                f'--cors-allow-origin "{origin}" is not an origin; write one such as https://chat.example.org, or *',
            )
    key_file = None if options.api_key_file is None else str(options.api_key_file)
    return AccessSettings(
        options.api_key,
        key_file,
        options.cors_allow_origin,
        options.allowed_host,
        tenant_by=options.tenant_by,
        admin_key=options.admin_key,
        engine_view=options.engine_view,
    )


def open_to_everyone(access: AccessSettings, listening: socket.socket) -> str | None:
    """Return a warning if other machines can use the server without a key."""
    if access.api_keys or access.api_key_file or listening.family == socket.AF_UNIX or serves_one_machine(listening):
        return None
    host = listening.getsockname()[0]
    return f"warning: no --api-key is set, and everyone who can reach {host} can use this server"


def check_chat_template(path: Path | None, command: str) -> None:
    """Exit with one line that begins with the command if the file is not a chat template."""
    if path is None:
        return
    from penstock.frontend.text.chat_template import ChatTemplate, read_template_file  # imports jinja2

    try:
        ChatTemplate(read_template_file(path), {}).check()
    except ValueError as error:
        fail(command, f"--chat-template {path}: {error}")


def tls_files(options: FrontendOptions, command: str) -> TlsFiles | None:
    """Return the TLS files; None without TLS. Exits with one line that begins with the command if they are unusable."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            fail(command, "--ssl-keyfile needs --ssl-certfile")
        return None
    keyfile = None if options.ssl_keyfile is None else str(options.ssl_keyfile)
    files = TlsFiles(str(options.ssl_certfile), keyfile, options.ssl_keyfile_password)
    try:
        ServerTls(files)
    except TlsError as error:
        fail(command, str(error))
    return files


def reloads(options: FrontendOptions) -> bool:
    """Whether SIGHUP makes workers read files again."""
    return options.api_key_file is not None or options.ssl_certfile is not None


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without keys and passwords, which only the frontend may have."""
    return {name: value for name, value in environment.items() if name not in _SECRETS}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _log(message: str) -> None:
    print(f"frontend: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
