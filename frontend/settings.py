"""Settings that the `frontend` command passes to each worker. Light to import: the command imports no server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from penstock.frontend.transport.serving.tls import TlsFiles

WORKER_SETTINGS_VARIABLE = "_PENSTOCK_FRONTEND_WORKER"
"""Carries the settings, which may contain keys: other users can read a command line but not an environment."""

ToolParserName = Literal[
    "auto",
    "none",
    "deepseek",
    "deepseek_v32",
    "gemma",
    "glm4",
    "granite",
    "harmony",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "mistral",
    "pythonic",
    "qwen3_coder",
]
EngineView = Literal["all", "own"]
ClientTokens = Literal["text", "tokens"]
TenantBy = Literal["none", "address", "forwarded"]
ReasoningParserName = Literal["auto", "none", "gemma", "granite", "harmony", "mistral", "think"]


_BODY_BYTES = 2 << 20
_PICTURE_BODY_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of one worker. A client that reads nothing for client_timeout_s is dropped."""

    max_body_bytes: int | None = None
    """None is the default of `body_limit`."""
    remote_image_hosts: tuple[str, ...] = ()
    idle_socket_timeout_s: float = 600.0
    """A WebSocket is closed when it has had no request for this long."""
    max_open_requests: int = 1024
    keep_alive_interval_s: float = 10.0
    hold_timeout_s: float = 120.0
    max_linger_s: int = 600
    max_held_requests: int = 256
    client_timeout_s: float = 30.0
    refuses_unknown_fields: bool = False
    max_stored_response_bytes: int = 64 << 20
    response_database: str | None = None
    """File that all workers share; None for the memory of each."""
    max_response_file_bytes: int = 256 << 20
    max_stored_responses: int = 4096
    stored_response_idle_s: float = 3600.0

    def body_limit(self, *, has_pictures: bool = False) -> int:
        """Return the largest body in bytes."""
        return self.max_body_bytes or (_PICTURE_BODY_BYTES if has_pictures else _BODY_BYTES)


class ParserNames(Struct, frozen=True):
    """Which parsers read the model's reasoning and tool calls, and how clients' inputs are read. auto chooses by the
    chat template."""

    tools: ToolParserName = "auto"
    reasoning: ReasoningParserName = "auto"
    special_tokens: ClientTokens = "text"
    takes_token_ids: bool = False
    """For models that compute vectors."""
    truncates_inputs: bool | None = None
    """For the same; None leaves it to the model's files."""


class AccessSettings(Struct, frozen=True):
    """Keys, origins and hosts that may send requests. Each worker reads the key file, and again at SIGHUP."""

    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    usage_fd: int = -1
    """Shared memory in which all workers count what keys use."""
    tenant_by: TenantBy = "none"
    """The tenant that the scheduler charges for a request without a key."""
    admin_key: str | None = None
    engine_view: EngineView | None = None
    """None: own if there are keys, else all."""


class TracingSettings(Struct, frozen=True):
    otlp_endpoint: str
    """The collector's URL for traces."""
    sample_ratio: float


class ModelSocket(Struct, frozen=True):
    """The backend of one of several models."""

    name: str
    """The model's name in the API, known before its backend has started."""
    path: str


class WorkerSettings(Struct, frozen=True):
    worker: int
    """This worker's number, from 0; num_workers share the socket and the usage table."""
    num_workers: int
    listen_fd: int
    accept_fd: int
    """Table in which workers share new connections."""
    socket_path: str
    replica_socket_paths: tuple[str, ...]
    """Backends with the model of the one at socket_path."""
    replica_dir: str | None
    """Directory whose sockets are these backends; then socket_path is the one to wait for while there is none."""
    prefixes_fd: int
    """Table in which workers remember which replica received which prompt; -1 without replicas."""
    embedding_socket_path: str | None
    rerank_socket_path: str | None
    """The same path as another's is the same backend; None means there is none."""
    model_sockets: tuple[ModelSocket, ...]
    """The backends of a server with several named models, the default one first. Otherwise empty."""
    models_fd: int
    """Table in which workers and the process that starts backends record which models are needed; -1 if none sleeps."""
    access: AccessSettings
    tls: TlsFiles | None
    limits: WorkerLimits
    drain_timeout_s: float
    resume_timeout_s: float
    log_level: str
    log_json: bool
    parsers: ParserNames = ParserNames()
    id_mark: str = ""
    """This server's number, in the ids of its answers."""
    starts_alone: bool = True
    """No other process reports that a backend has not started yet; `penstock serve` does."""
    tracing: TracingSettings | None = None
    chat_template_path: str | None = None
    """Replaces the chat template of the model at socket_path."""
