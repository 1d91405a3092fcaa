"""`penstock serve`: one or several backends and the frontend as children of one supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from penstock.backend.checkpoint.hub import fetch_small_files
from penstock.backend.checkpoint.other_layouts.directory import complete_directory
from penstock.backend.checkpoint.sources.hub_files import go_offline
from penstock.backend.errors import StartupError
from penstock.backend.model_names import DEMO_MODEL, SHIPPED_MODELS
from penstock.backend.options import BackendOptions
from penstock.frontend.endpoints.responses.storage.state_files import NO_STATE
from penstock.frontend.main import (
    check_chat_template,
    listening_socket,
    open_to_everyone,
    read_access,
    reloads,
    tls_files,
)
from penstock.frontend.transport.serving.listening import address_of, unlink
from penstock.process.children import module_argv
from penstock.process.failure import fail
from penstock.process.logs import shown_log
from penstock.process.options import ENV_PREFIX, to_argv
from penstock.process.private_directory import UnsafeDirectory
from penstock.process.service_manager import find_service_manager
from penstock.process.supervisor import ChildSpec, Supervisor
from penstock.serve.backend_children import BackendChildren, CannotStart, PreparedBackend, SharedWeights
from penstock.serve.default_models import with_default_models
from penstock.serve.model_texts import why_unusable
from penstock.serve.options import (
    COMMAND,
    MAIN,
    ServeOptions,
    backend_options,
    frontend_options,
    private_socket_path,
    replica_options,
)
from penstock.serve.probe import get
from penstock.serve.sleeping_models.sleepers import Sleepers
from penstock.serve.upgrade.control import ControlSocket
from penstock.serve.upgrade.succession import Running, Upgrades
from penstock.serve.welcome import ShownModel, Use, Welcome
from penstock.shm.link.listening_address import AddressInUse, CannotListen, check_free
from penstock.shm.recording.running_servers import RunningServer, ServerRecord

_STOP_MARGIN_S = 10.0
"""Time that a child gets beyond the drain timeout before it is killed."""


def shown_models(listed: bytes | None, otherwise: str) -> tuple[ShownModel, ...]:
    """Return the models of /v1/models; without an answer, because only a file knows the keys, a chat with this one."""
    uses: dict[str, Use] = {"structured_output": "chat", "embeddings": "embeddings", "rerank": "rerank"}
    models = []
    for model in [] if listed is None else json.loads(listed)["data"]:
        if model["id"] != model["root"]:  # an alias
            continue
        if "capabilities" not in model:  # it has never been loaded
            continue
        known = [use for capability, use in uses.items() if model["capabilities"][capability]]
        models.append(
            ShownModel(
                model["id"],
                known[0] if known else "classify",
                quantization=model["quantization"],
                context_tokens=model["max_model_len"],
                kv_tokens=model["kv_cache_tokens"],
                tokens_per_s=model["max_tokens_per_second"],
            )
        )
    return tuple(models) or (ShownModel(otherwise),)


def all_described(listed: bytes) -> bool:
    """Whether the answer of /v1/models describes all models that are awake, or why not: workers read their files
    first."""
    models = json.loads(listed)["data"]
    return all("capabilities" in model or model["state"] != "awake" or model["last_error"] for model in models)


def split_keys(options: ServeOptions) -> tuple[ServeOptions, dict[str, str]]:
    """Return the options without secrets, and an environment that holds the secrets.

    Other users of the machine can read command lines, but not environments.
    """
    environment = dict(os.environ)
    if options.api_key:
        environment[f"{ENV_PREFIX}API_KEY"] = ",".join(options.api_key)
    if options.admin_key is not None:
        environment[f"{ENV_PREFIX}ADMIN_KEY"] = options.admin_key
    if options.ssl_keyfile_password is not None:
        environment[f"{ENV_PREFIX}SSL_KEYFILE_PASSWORD"] = options.ssl_keyfile_password
    return dataclasses.replace(options, api_key=(), admin_key=None, ssl_keyfile_password=None), environment


def serve(options: ServeOptions) -> int:
    """Run until a signal stops it; return the exit status. A dry run starts only the backends, one after the other."""
    if options.offline:
        go_offline()
    with shown_log(COMMAND):
        options = with_default_models(options)
    backends = backend_options(options)
    replicas = replica_options(options)
    if options.dry_run:
        runs = [module_argv("penstock.backend.main", to_argv(backend)) for backend in backends.values()]
        return next((code for argv in runs if (code := subprocess.run(argv, check=False).returncode)), 0)
    access = read_access(options, COMMAND)
    tls_files(options, COMMAND)
    check_chat_template(options.chat_template, COMMAND)
    with shown_log(COMMAND):
        for name, backend in list(backends.items())[: len(options.models) if options.has_names else None]:
            _check_texts(backend, options.chat_template if name == MAIN else None)
    backends |= replicas
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(listening_socket(options, COMMAND))
        if (warning := open_to_everyone(access, listening)) is not None:
            _log(warning)
        for backend in backends.values():
            stack.enter_context(_backend_socket(backend.socket, is_private=options.socket == private_socket_path()))
        # Until the supervisor handles SIGUSR2, it must not kill this process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        control = None if options.may_sleep else ControlSocket.beside(options.socket, _log)
        if control is not None:
            stack.callback(control.close)
        return _supervise(options, backends, listening, control)


def _check_texts(backend: BackendOptions, template_file: Path | None) -> None:
    """Exits with one line if a model has no usable tokenizer or template. Of a hub model everything but the weights is
    downloaded for that. A backend without HTTP needs neither, so it does not check."""
    if backend.model is None or backend.model in SHIPPED_MODELS:
        return
    try:
        path = fetch_small_files(backend.model, backend.revision)
        path = complete_directory(path) if path.is_dir() else path
    except StartupError as error:
        fail(COMMAND, str(error))
    if path.is_dir() and (reason := why_unusable(path, template_file)) is not None:
        fail(COMMAND, reason)


@contextlib.contextmanager
def _backend_socket(path: Path, *, is_private: bool) -> Iterator[None]:
    """Hold the backend's socket path. Exits with one line if another backend serves it.

    A private path leaves no files behind.
    """
    try:
        check_free(path)
        if is_private:
            _remove_leftovers(path.parent)
        yield
    except CannotListen as error:
        fail(COMMAND, str(error))
    finally:
        if is_private:
            _remove_socket(path)


def _remove_leftovers(directory: Path) -> None:
    """Remove the sockets of servers that were killed."""
    for lock in directory.glob("serve-*.lock"):
        path = lock.with_suffix("")
        if not Path("/proc", path.stem.removeprefix("serve-").partition("-")[0]).exists():
            with contextlib.suppress(AddressInUse):  # its backend outlives the server for a moment
                check_free(path)
                _remove_socket(path)


def _remove_socket(path: Path) -> None:
    for name in ("", ".lock"):  # the lock last: leftovers are found by it
        path.with_name(path.name + name).unlink(missing_ok=True)


def _supervise(
    options: ServeOptions,
    backends: Mapping[str, BackendOptions],
    listening: socket.socket,
    control: ControlSocket | None,
) -> int:
    """Run all children until a signal stops it."""
    manager = find_service_manager(COMMAND)
    tls = options.ssl_certfile is not None
    has_keys = bool(options.api_key or options.api_key_file)
    sleepers = _sleepers(options, list(backends.values()))
    starts, prepared = _prepare(options, backends)
    record = ServerRecord.of_this_process()

    def announce_when_up() -> bool:
        if get(listening, "/ready", tls=tls) is None:
            return False
        listed = get(listening, "/v1/models", tls=tls, key=options.api_key[0] if options.api_key else None)
        if listed is not None and not all_described(listed):
            return False
        models = shown_models(listed, next(iter(backends)) if options.has_names else options.model_id())
        welcome = Welcome(address_of(listening, tls=tls), models, tls, has_keys)
        _write_record(record, welcome, backends)
        # In one write, also without a buffer: other processes' log lines may not come before its end.
        print(f"{welcome.ready_line()}\n", end="", flush=True)
        if not options.log_json:
            print(f"\n{welcome.summary()}\n\n{welcome.examples()}\n", flush=True)
        return True

    def close() -> None:
        record.remove()
        unlink(listening)
        listening.close()

    supervisor = Supervisor(
        [
            *(backend.spec(name) for name, backend in prepared.items() if sleepers is None),
            _frontend(options, backends, listening, None if sleepers is None else sleepers.table_fd),
        ],
        log=_log,
        stop_timeout_s=options.drain_timeout_s + _STOP_MARGIN_S,
        is_up=announce_when_up,
        # The frontend closes its copy too; while any copy is open, clients connect and nobody answers.
        on_stop=close,
        service_manager=manager,
    )
    if sleepers is not None:
        supervisor.attendant = sleepers.attendant(supervisor, list(prepared.values()), _log)
    elif control is not None:
        running = [
            Running(name, child, prepared[name]) for name, child in zip(prepared, supervisor.children, strict=False)
        ]
        supervisor.attendant = Upgrades(supervisor, control, starts, running, _log)
    return supervisor.run()


def _write_record(record: ServerRecord, welcome: Welcome, backends: Mapping[str, BackendOptions]) -> None:
    """Without a record `penstock ps` and others do not see this server; it serves all the same."""
    sources = tuple(backend.model or DEMO_MODEL for backend in backends.values())
    names = tuple(name for backend in backends.values() for name in (backend.model_id(), *backend.aliases()))
    try:
        record.write(RunningServer(os.getpid(), welcome.reachable_address(), names, sources, time.time()))
    except (OSError, UnsafeDirectory) as error:
        _log(f"penstock ps will not show this server: {error}")


def _frontend(
    options: ServeOptions, backends: Mapping[str, BackendOptions], listening: socket.socket, models_fd: int | None
) -> ChildSpec:
    """Return the frontend's child. It inherits the listening socket, so a restarted one answers at the same address."""
    public_options, environment = split_keys(
        dataclasses.replace(options, listen_fd=listening.fileno(), models_fd=models_fd)
    )
    frontend_argv = module_argv("penstock.frontend.main", to_argv(frontend_options(public_options, backends)))
    fds = (listening.fileno(), *(() if models_fd is None else (models_fd,)))
    return ChildSpec("frontend", frontend_argv, fds, environment, stage=1, reloads=reloads(options))


def _prepare(
    options: ServeOptions, backends: Mapping[str, BackendOptions]
) -> tuple[BackendChildren, dict[str, PreparedBackend]]:
    """Return how the backends start, and each by its name in the log. Exits with one line if one cannot."""
    starts = BackendChildren(
        _log,
        hang_timeout_s=options.hang_timeout_s,
        num_replicas=options.num_replicas,
        may_die_often=len(backends) > 1,
        crashes=None if options.state_dir == NO_STATE else Path(options.state_dir) / "crashes",
        weights=SharedWeights() if options.hold_weights else None,
        persist_kv=options.persist_kv,
    )
    try:
        prepared = {
            f"model {name}" if options.has_names else name: starts.prepare(backend)
            for name, backend in backends.items()
        }
    except CannotStart as error:
        fail(COMMAND, str(error))
    return starts, prepared


def _sleepers(options: ServeOptions, backends: Sequence[BackendOptions]) -> Sleepers | None:
    """Return None if no model sleeps. Exits with one line for a model that does not fit the memory."""
    if not options.may_sleep:
        return None
    try:
        return Sleepers.of(
            backends,
            num_loaded=len(options.models),
            num_workers=options.workers,
            idle_s=options.sleep_after_s,
            budget_bytes=options.models_memory,
        )
    except (StartupError, OSError) as error:
        fail(COMMAND, str(error))


def _log(message: str) -> None:
    print(f"{COMMAND}: {message}", file=sys.stderr, flush=True)
