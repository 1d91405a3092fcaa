"""Every option of the frontend, declared once: type, default, help text, environment variable PENSTOCK_<NAME>."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from penstock.frontend.endpoints.responses.storage.state_files import default_state_dir
from penstock.frontend.settings import (
    ClientTokens,
    EngineView,
    ParserNames,
    ReasoningParserName,
    TenantBy,
    ToolParserName,
)
from penstock.process.options import ByteSize, OptionalByteSize, grouped
from penstock.process.private_directory import default_socket_path
from penstock.shm.messages import MAX_LINGER_S

Positive = Annotated[int, Parameter(validator=Number(gte=1))]
MAX_WORKERS = 256
Seconds = Annotated[float, Parameter(validator=Number(gt=0.0, lte=86_400.0))]
Port = Annotated[int, Parameter(validator=Number(gte=0, lte=65_535))]


def _split_keys(_type: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    keys = tuple(key.strip() for token in tokens for key in token.value.split(","))
    if not all(keys):
        raise ValueError("an API key is empty; separate keys by single commas")
    return keys


def _check_key(_type: Any, value: str | None) -> None:
    if value is not None and not (0 < len(value) <= 512 and value.isascii() and value.isprintable()):
        raise ValueError("the key must be 1 to 512 printable ASCII characters")


def _check_mode(_type: Any, tokens: Sequence[Token]) -> str:
    mode = tokens[0].value
    if not re.fullmatch("0?[0-7]{3}", mode):
        raise ValueError(f'"{mode}" is not a file mode in octal; write 660 or 600')
    return mode


_GROUPS = {
    "Used most": "host port workers api_key",
    "Model and weights": "tool_parser reasoning_parser chat_template special_tokens_in_chats allow_token_ids "
    "truncate_inputs",
    "Listening": "uds uds_mode ssl_certfile ssl_keyfile ssl_keyfile_password listen_fd",
    "Access": "api_key_file admin_key tenant_by engine_view cors_allow_origin allowed_host",
    "Limits of requests": "max_body allow_remote_images max_open_requests response_store state_dir strict",
    "Failures and restarts": "drain_timeout_s resume_timeout_s hold_timeout_s max_held_requests keep_alive_interval_s "
    "max_linger_s",
    "Processes": "socket replica_socket replica_dir model_socket models_fd embedding_socket rerank_socket "
    "server_number",
    "Logs and traces": "log_level log_json otlp_endpoint trace_sample_ratio",
}


@Parameter(name="*")
@grouped(_GROUPS)
@dataclass(frozen=True)
class FrontendOptions:
    """The HTTP processes, which share one port."""

    host: str = "127.0.0.1"
    """Address to listen on. The default serves this machine only; 0.0.0.0 is every interface, :: also with IPv6."""

    port: Port = 8000
    """Port to listen on; 0 takes a free one."""

    uds: Path | None = None
    """Unix socket to listen on, instead of host and port."""

    uds_mode: Annotated[str, Parameter(converter=_check_mode)] = "660"
    """File mode of the Unix socket, in octal: who may connect."""

    ssl_certfile: Path | None = None
    """Certificate with its chain, in PEM; clients then use https. Read again at SIGHUP."""

    ssl_keyfile: Path | None = None
    """Private key of the certificate, if it is in another file."""

    ssl_keyfile_password: Annotated[str | None, Parameter(show_default=False)] = None
    """Password of an encrypted key. Better set in the environment, which other users of the machine cannot read."""

    listen_fd: Annotated[int | None, Parameter(show=False, validator=Number(gte=0))] = None
    """File descriptor of a listening socket to use instead of host and port; `penstock serve` passes its own."""

    workers: Annotated[int, Parameter(validator=Number(gte=1, lte=MAX_WORKERS))] = 1
    """Processes that share the port, at most 256."""

    socket: Path = field(default_factory=default_socket_path)
    """Unix socket of the backend."""

    replica_socket: Annotated[tuple[Path, ...], Parameter(negative="", consume_multiple=False, show_default=False)] = ()
    """Unix socket of a further backend with the same model; may be repeated. Requests are spread over all of them, and
    those of one that dies, drains or hangs continue on the others. A backend with another model is refused."""

    replica_dir: Path | None = None
    """Directory whose sockets (*.sock) are the backends, all with the same model; read again and again: one that
    appears is taken up, one that vanishes is dropped when its streams continue elsewhere. Replaces --socket."""

    model_socket: Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=False, show_default=False)] = ()
    """NAME=PATH: Unix socket of the backend of one of several models, and that model's name; may be repeated. A
    request's model chooses. Replaces --socket."""

    models_fd: Annotated[int | None, Parameter(show=False, validator=Number(gte=0))] = None
    """File descriptor of the table of models that sleep, which `penstock serve` keeps."""

    embedding_socket: Path | None = None
    """Unix socket of a further backend that computes embeddings."""

    rerank_socket: Path | None = None
    """Unix socket of a further backend that reranks or classifies."""

    server_number: Annotated[int | None, Parameter(validator=Number(gte=0, lte=65_535))] = None
    """Number of this server among several behind a router, in the ids of its answers: four hexadecimal digits, by which
    the router finds the server of a stream or a response. `penstock ray` sets it."""

    api_key: Annotated[
        tuple[str, ...], Parameter(converter=_split_keys, consume_multiple=False, negative="", show_default=False)
    ] = ()
    """Key that clients must send (Authorization: Bearer KEY); may be repeated, or several separated by commas. Better
    set in the environment, which other users of the machine cannot read. Without any key, no key is needed."""

    api_key_file: Path | None = None
    """File of keys, one a line: KEY [name=NAME] [weight=W] [admin=yes] [requests_in_flight=N]
    [requests_per_minute=N] [tokens_per_minute=N]. A key over its limits gets 429; admin=yes may load and unload models.
    Read again at SIGHUP."""

    admin_key: Annotated[str | None, Parameter(validator=_check_key, show_default=False)] = None
    """Key of the operator, who may cancel any request (`penstock top`). It is no key for clients. Better set in the
    environment. Without it nobody may."""

    tenant_by: TenantBy = "address"
    """Without keys, whose share of the device a request takes: that of the address it comes from (IPv6: of its /64
    network), that of the last address in X-Forwarded-For, which only a proxy in front makes true, or none: all clients
    are one tenant. With keys it is always the key's."""

    engine_view: Annotated[EngineView | None, Parameter(show_default=False)] = None
    """Whose requests the engine page shows one by one: all, or only the viewer's own, and sums of the others. The admin
    key, and keys with admin=yes, see all. Default: own with keys, all without."""

    cors_allow_origin: Annotated[
        tuple[str, ...], Parameter(negative="", consume_multiple=False, show_default=False)
    ] = ()
    """Origin whose web pages may read answers, such as https://chat.example.org, or * for all; may be repeated."""

    allowed_host: Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=False, show_default=False)] = ()
    """Host name that a server without keys on a loopback address accepts, in addition to localhost, IP addresses, names
    without a dot, and names under .local and .internal; may be repeated, * accepts all."""

    max_body: OptionalByteSize = None
    """Largest request body, such as 2MiB. Default: 2MiB, and 32MiB with a model that takes pictures."""

    allow_remote_images: Annotated[
        tuple[str, ...], Parameter(negative="", consume_multiple=False, show_default=False)
    ] = ()
    """Host, as HOST or HOST:PORT, from which pictures are fetched for a request that has their http or https address;
    may be repeated. *.HOST is every name below it, * every host. Private addresses are refused, unless they are named
    themselves. Without this option pictures come as data URIs only."""

    max_open_requests: Positive = 1024
    """Requests that one worker has open at once; further ones get 429. Tenants with less than their share of the places
    may exceed it, to twice as many."""

    response_store: ByteSize = 64 << 20
    """Space for finished responses, for /v1/responses: of all workers on disk, or of each in memory with --state-dir
    none; 0 keeps none."""

    state_dir: Annotated[str, Parameter(show_default=False)] = field(default_factory=default_state_dir)
    """Directory for stored responses, with a folder for each address that a server listens on; none keeps them in the
    memory of each worker, which other workers cannot see. Default: $XDG_STATE_HOME/penstock, or
    ~/.local/state/penstock."""

    tool_parser: ToolParserName = "auto"
    """How the model writes tool calls; auto chooses by its chat template, none refuses tools."""

    reasoning_parser: ReasoningParserName = "auto"
    """How the model marks its reasoning: think is the `<think>` tag, mistral is [THINK] to [/THINK], harmony is the
    analysis channel, granite is Granite's phrases or tags, none leaves it in the text; auto chooses by the chat
    template and the tokens."""

    chat_template: Path | None = None
    """File with a chat template in Jinja, instead of the model's own. For the model that generates text."""

    special_tokens_in_chats: ClientTokens = "text"
    """What a client's <|im_end|> or another special token is in a chat's messages, tools and documents: text, or the
    token, with which a text can end its message and begin another role's."""

    allow_token_ids: bool = False
    """Take token ids as input of embeddings and classification. LangChain sends those of OpenAI's tokenizer unless it
    has check_embedding_ctx_length=False; in another model they are other words."""

    truncate_inputs: bool | None = None
    """Truncate inputs that are too long for embeddings or scores, unless the request says otherwise. Default:
    yes for a model whose files name max_seq_length, as sentence-transformers does; others are refused."""

    strict: bool = False
    """Refuse requests with unknown fields, which are otherwise ignored."""

    drain_timeout_s: Seconds = 30.0
    """Seconds that running requests may take to finish when the server stops."""

    resume_timeout_s: Seconds = 600.0
    """Seconds that running requests wait for the next backend after one has died; they continue where they stopped.
    The default lets a model of 70 GB load at 0.2 GB/s."""

    hold_timeout_s: Seconds = 120.0
    """Seconds that a new request waits while no backend is ready, before it gets 503."""

    max_held_requests: Positive = 256
    """New requests of a tenant (each choice of each prompt counts) that wait in one worker while no backend is ready;
    further ones get 503. If one tenant has taken so many, others still find places, in all as many again."""

    keep_alive_interval_s: Seconds = 10.0
    """Seconds of silence after which a stream sends a comment, so that proxies keep it open."""

    max_linger_s: Annotated[int, Parameter(validator=Number(gte=0, lte=MAX_LINGER_S))] = 600
    """Seconds that a client's header X-Penstock-Linger may ask for: so long its stream lives on without a connection.
    0 refuses the header."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages to log."""

    log_json: bool = False
    """Log one JSON object per line."""

    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector for traces, such as http://127.0.0.1:4318/v1/traces. Needs the extra "otel"."""

    trace_sample_ratio: Annotated[float, Parameter(validator=Number(gte=0.0, lte=1.0))] = 1.0
    """Share of the requests that are traced. A caller that sends the header traceparent decides for its own."""

    def parsers(self) -> ParserNames:
        return ParserNames(
            self.tool_parser,
            self.reasoning_parser,
            self.special_tokens_in_chats,
            self.allow_token_ids,
            self.truncate_inputs,
        )
