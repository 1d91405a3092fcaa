"""One frontend process, started by `penstock.frontend.main`, which owns the listening socket."""

from __future__ import annotations

from penstock.process.garbage_collection import pause_collection, resume_collection, spare_imports

if __name__ == "__main__":
    pause_collection()

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from penstock.frontend.access.admission import Admission
from penstock.frontend.access.api_keys import ApiKey, KeyFileError, named_keys, read_key_file
from penstock.frontend.access.hosts import serves_one_machine
from penstock.frontend.access.usage_table import UsageTable
from penstock.frontend.app import App
from penstock.frontend.generation.models.model_table import ServedModels
from penstock.frontend.generation.models.served_model import ModelKeeper
from penstock.frontend.generation.models.waking import WakingModel
from penstock.frontend.pictures.workshop import PictureWorkshop
from penstock.frontend.settings import WORKER_SETTINGS_VARIABLE, AccessSettings, WorkerSettings
from penstock.frontend.telemetry.tracing import SpanReporter, otlp_exporter
from penstock.frontend.transport.serving.accept_table import AcceptTable
from penstock.frontend.transport.serving.connections import raise_fd_limit
from penstock.frontend.transport.serving.server import HttpServer
from penstock.frontend.transport.serving.tls import ServerTls, TlsError
from penstock.process.logs import set_up_logging
from penstock.shm.client import ReplicaSet, SocketDirectory
from penstock.shm.memory.model_table import ModelTable
from penstock.shm.memory.prefix_table import PrefixTable

if TYPE_CHECKING:
    from penstock.frontend.pictures.remote import RemotePictures

logger = logging.getLogger("penstock.worker")


async def serve(settings: WorkerSettings) -> None:
    """Serve until a signal, then drain and return."""
    listening = socket.socket(fileno=settings.listen_fd)
    max_connections = raise_fd_limit()
    accept_table = AcceptTable.attach(settings.accept_fd, settings.num_workers, settings.worker)
    workshop = PictureWorkshop(_remote_pictures(settings.limits.remote_image_hosts))
    models = served_models(settings, workshop)
    for keeper in models.keepers:
        if keeper.waking is None:
            await keeper.backend.start()
    access = settings.access
    usage = UsageTable.attach(access.usage_fd, settings.num_workers, settings.worker)
    allowed_hosts = access.allowed_hosts if serves_one_machine(listening) else ("*",)
    admission = Admission(
        read_keys(access),
        cors_origins=access.cors_origins,
        allowed_hosts=allowed_hosts,
        usage=usage,
        tenant_by=access.tenant_by,
        admin_key=access.admin_key,
        engine_view=access.engine_view,
    )
    spans = None
    if settings.tracing is not None:
        spans = SpanReporter(otlp_exporter(settings.tracing.otlp_endpoint), settings.tracing.sample_ratio)
    app = App(models, admission=admission, limits=settings.limits, report_spans=None if spans is None else spans.report)
    tls = None if settings.tls is None else ServerTls(settings.tls)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, settings, admission, tls)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # the supervisor blocked it for the start
    server = HttpServer(
        app,
        app.exchanges,
        listening,
        drain_timeout_s=settings.drain_timeout_s,
        max_connections=max_connections,
        tls=None if tls is None else tls.context,
        accept_table=accept_table,
        max_message_bytes=settings.limits.body_limit(has_pictures=True),
    )
    try:
        async with asyncio.TaskGroup() as tasks:  # a worker whose watch has failed ends, and another is started
            watches = [tasks.create_task(keeper.watch()) for keeper in models.keepers]
            watches += [tasks.create_task(each.waking.watch()) for each in models.keepers if each.waking is not None]
            watches.append(tasks.create_task(app.responses.run(app.context)))
            await server.run()
            for watch in watches:
                watch.cancel()
        await app.responses.stop()
    finally:
        app.store.close()
        workshop.close()
        if spans is not None:
            await asyncio.to_thread(spans.close)
        for keeper in models.keepers:
            await keeper.backend.close()


def _remote_pictures(hosts: tuple[str, ...]) -> RemotePictures | None:
    if not hosts:
        return None
    from penstock.frontend.pictures.remote import RemotePictures  # with its HTTP client, which few servers need

    return RemotePictures(hosts)


def served_models(settings: WorkerSettings, workshop: PictureWorkshop | None = None) -> ServedModels:
    """Return the worker's models, with a client for each backend."""
    keepers: dict[str, ModelKeeper] = {}
    template = settings.chat_template_path

    def keeper_of(path: str | None) -> ModelKeeper | None:
        return None if path is None else keepers.get(path) or connect(path)

    def connect(path: str, template_file: Path | None = None, name: str | None = None) -> ModelKeeper:
        client, logs = _client(settings, path), settings.starts_alone
        keepers[path] = ModelKeeper(
            client,
            settings.parsers,
            template_file,
            name=name,
            id_mark=settings.id_mark,
            reports_absence=logs,
            workshop=workshop,
        )
        return keepers[path]

    if settings.model_sockets:
        first, *others = [connect(model.path, name=model.name) for model in settings.model_sockets]
        if settings.models_fd >= 0:
            table = ModelTable.of_worker(settings.models_fd, settings.num_workers, settings.worker)
            for index, keeper in enumerate((first, *others)):
                keeper.waking = WakingModel(settings.model_sockets[index].name, table, index, keeper.backend)
        return ServedModels(first, others=others)
    return ServedModels(
        connect(settings.socket_path, None if template is None else Path(template)),
        embedding=keeper_of(settings.embedding_socket_path),
        rerank=keeper_of(settings.rerank_socket_path),
    )


def _client(settings: WorkerSettings, path: str) -> ReplicaSet:
    """Return a client of the backend there, of the one that takes the path over, and of its replicas."""
    resume_s, hold_s = settings.resume_timeout_s, settings.limits.hold_timeout_s
    max_held = settings.limits.max_held_requests
    is_main = path == settings.socket_path
    paths = [Path(path), *map(Path, settings.replica_socket_paths if is_main else ())]
    directory = None
    if is_main and settings.replica_dir is not None:
        directory = SocketDirectory(Path(settings.replica_dir))
    table = None if directory is None and len(paths) == 1 else PrefixTable.attach(settings.prefixes_fd)
    return ReplicaSet(
        paths, resume_timeout_s=resume_s, max_held=max_held, hold_timeout_s=hold_s, prefixes=table, directory=directory
    )


def read_keys(access: AccessSettings) -> list[ApiKey]:
    """Return the keys of the settings and of the key file. Raises KeyFileError."""
    keys = named_keys(access.api_keys)
    return keys if access.api_key_file is None else keys + read_key_file(Path(access.api_key_file))


def _reload(settings: WorkerSettings, admission: Admission, tls: ServerTls | None) -> None:
    """Read keys and certificate from their files again. If either is unusable, the old one stays."""
    try:
        admission.set_keys(read_keys(settings.access))
    except ValueError as error:
        logger.error("kept the old API keys: %s", error)
    else:
        logger.info("read the API keys again")
    if tls is not None:
        try:
            tls.reload()
        except TlsError as error:
            logger.error("kept the old certificate: %s", error)
        else:
            logger.info("read the certificate again")


def main() -> None:
    encoded = os.environ.pop(WORKER_SETTINGS_VARIABLE, None)
    if encoded is None:
        sys.exit("penstock.frontend.worker cannot run alone: start `frontend`")
    spare_imports()
    settings = msgspec.json.decode(encoded, type=WorkerSettings)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    handler = set_up_logging(settings.log_level, as_json=settings.log_json)
    # uvicorn logs what clients did, per request; the request log and the error answers say it better.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    resume_collection()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except (KeyFileError, TlsError) as error:
        # The command checked these files when it started; a restarted worker may find them changed.
        logger.critical("cannot start: %s", error)
        sys.exit(1)
    finally:
        handler.close()


if __name__ == "__main__":
    main()
