"""Every option of the frontend, declared once: type, default, help text, environment variable PENSTOCK_<NAME>."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from penstock.frontend.settings import ReasoningParserName, ToolParserName
from penstock.shm.process.options import ByteSize
from penstock.shm.process.socket_path import default_socket_path

Positive = Annotated[int, Parameter(validator=Number(gte=1))]
Seconds = Annotated[float, Parameter(validator=Number(gt=0.0, lte=86_400.0))]
Port = Annotated[int, Parameter(validator=Number(gte=0, lte=65_535))]


def _split_keys(_type: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    keys = tuple(key.strip() for token in tokens for key in token.value.split(","))
    if not all(keys):
        raise ValueError("an API key is empty")
    return keys


def _check_mode(_type: Any, tokens: Sequence[Token]) -> str:
    mode = tokens[0].value
    if not re.fullmatch("0?[0-7]{3}", mode):
        raise ValueError(f'"{mode}" is not a mode in octal; write 660 or 600')
    return mode


@Parameter(name="*")
@dataclass(frozen=True)
class FrontendOptions:
    """The HTTP processes: as many as wanted, one port."""

    host: str = "127.0.0.1"
    """Address to listen on. The default serves this machine only; 0.0.0.0 is every interface."""

    port: Port = 8000
    """Port to listen on; 0 takes a free one."""

    uds: Path | None = None
    """Unix socket to listen on, in place of host and port."""

    uds_mode: Annotated[str, Parameter(converter=_check_mode)] = "660"
    """Who may connect to it: the mode of its file, in octal."""

    ssl_certfile: Path | None = None
    """Certificate with its chain, in PEM: clients then speak https. It is read again at SIGHUP."""

    ssl_keyfile: Path | None = None
    """Its private key, where that is in a file of its own."""

    ssl_keyfile_password: Annotated[str | None, Parameter(show_default=False)] = None
    """Of an encrypted key. Better given by the environment, where other users of the machine do not see it."""

    listen_fd: Annotated[int | None, Parameter(show=False, validator=Number(gte=0))] = None
    """A listening socket that was inherited takes the place of host and port: `penstock serve` hands its own over."""

    workers: Positive = 1
    """Processes that share the port."""

    socket: Path = field(default_factory=default_socket_path)
    """Unix socket on which the backend is found."""

    api_key: Annotated[
        tuple[str, ...], Parameter(converter=_split_keys, consume_multiple=False, negative="", show_default=False)
    ] = ()
    """Key that clients must send (Authorization: Bearer KEY); may be repeated, or several with commas between. Better
    given by the environment, where other users of the machine do not see it. Without one, all may ask."""

    api_key_file: Path | None = None
    """File of keys, one a line: KEY [name=NAME] [requests_in_flight=N] [requests_per_minute=N] [tokens_per_minute=N].
    Beyond its limits a key is answered 429. Read again at SIGHUP."""

    cors_allow_origin: Annotated[
        tuple[str, ...], Parameter(negative="", consume_multiple=False, show_default=False)
    ] = ()
    """Origin whose pages may read answers in a browser, such as https://chat.example.org, or * for all; may be
    repeated."""

    allowed_host: Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=False, show_default=False)] = ()
    """Name by which browsers may call a server that has no key and listens on this machine's own address, besides
    localhost, addresses, names without a dot, and those under .local and .internal; may be repeated, * is all."""

    max_body: ByteSize = 2 << 20
    """Largest request body, such as 2MiB."""

    max_open_requests: Positive = 1024
    """Requests that one worker has open at once; beyond it the answer is 429."""

    response_store: ByteSize = 64 << 20
    """What each worker may keep of finished responses, for /v1/responses; 0 keeps none."""

    tool_parser: ToolParserName = "auto"
    """How the model writes tool calls; auto goes by its chat template, none offers no tools."""

    reasoning_parser: ReasoningParserName = "auto"
    """How the model marks its reasoning: think is the tag of that name, mistral is [THINK] to [/THINK], none leaves it
    in the text; auto goes by the chat template and the tokens."""

    strict: bool = False
    """Refuse requests with fields that are not known here, which otherwise are ignored."""

    drain_timeout_s: Seconds = 30.0
    """Seconds that running requests get to finish when told to stop."""

    keep_alive_interval_s: Seconds = 10.0
    """A stream that is silent this long gets a comment, so that no proxy takes it for dead."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that are logged."""

    log_json: bool = False
    """Log one JSON object a line."""
