"""The options of `penstock ray`, and the options of `penstock serve` that it accepts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number

from penstock.frontend.endpoints.responses.storage.state_files import default_state_dir
from penstock.process.failure import fail
from penstock.serve.fleet.cluster import MAX_SERVERS
from penstock.serve.fleet.router import RouterKind, RouterSettings
from penstock.serve.foreign_options import explain
from penstock.serve.options import ServeOptions

COMMAND = "penstock ray"
_MAX_WORDS = 256
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_LISTEN = re.compile(r"([\w.*:\[\]-]+):(\d{1,5})")
_OURS = {
    "host": "a server listens on its node's address",
    "port": "each server takes a free port of its node",
    "uds": "the router comes from other machines",
    "ssl-certfile": "the router ends TLS; servers belong into a network of their own",
    "ssl-keyfile": "the router ends TLS",
    "server-number": "each server has its own",
    "api-key": "other users of the nodes could read it; set PENSTOCK_API_KEY for `penstock ray up`",
    "admin-key": "other users of the nodes could read it; set PENSTOCK_ADMIN_KEY for `penstock ray up`",
    "dry-run": "it starts no server",
}
Count = Annotated[int, Parameter(validator=Number(gte=1, lte=MAX_SERVERS))]


def _check_name(_type: object, value: str) -> None:
    if not _NAME.fullmatch(value):
        raise ValueError("a name has 1 to 40 small letters, digits and hyphens, and begins with no hyphen")


def _check_listen(_type: object, value: str) -> None:
    found = _LISTEN.fullmatch(value)
    if found is None or not 1 <= int(found[2]) <= 65_535:
        raise ValueError(f'"{value}" is not an address; write HOST:PORT, with a port from 1 to 65535')


@Parameter(name="*")
@dataclass(frozen=True)
class FleetOptions:
    """Which servers, and which router."""

    address: str | None = None
    """Address of the Ray cluster, such as 10.0.0.1:6379. Default: the one that this machine belongs to."""

    name: Annotated[str, Parameter(validator=_check_name, show_env_var=False)] = "penstock"
    """Name of this set of servers; one cluster may have several sets, each with a router."""

    router: Annotated[RouterKind | Literal["none"], Parameter(metavar="CHOICE")] = "haproxy"
    """Program in front of the servers. none: only the list of servers is printed."""

    listen: Annotated[str, Parameter(validator=_check_listen)] = "127.0.0.1:8080"
    """HOST:PORT where the router waits for clients."""

    router_dir: Path | None = None
    """Directory of the router's configuration, its log, and servers.json, the list for Prometheus. Default: router-NAME
    in the state directory."""

    router_template: Path | None = None
    """Template of the router's configuration, in Jinja, instead of the shipped one."""

    router_reload: str | None = None
    """Command that lets a router, which somebody else runs, read its configuration again, such as "systemctl reload
    haproxy". Default: the router is started as a daemon."""

    def router_settings(self) -> RouterSettings | None:
        if self.router == "none":
            return None
        directory = (self.router_dir or Path(default_state_dir(), f"router-{self.name}")).expanduser().absolute()
        return RouterSettings(self.router, directory, self.listen, self.router_template, self.router_reload)


@Parameter(name="*")
@dataclass(frozen=True)
class UpOptions(FleetOptions):
    """What runs where."""

    nodes_with: Literal["gpu", "cpu"] = "gpu"
    """Nodes that get a server each: those with a GPU, of which the server reserves one, or those with free CPUs."""

    replicas: Annotated[Count, Parameter(show_env_var=False)] = 1
    """Servers. Those for which there is no node wait for one."""

    max_replicas: Annotated[int | None, Parameter(validator=Number(gte=1, lte=MAX_SERVERS))] = None
    """Servers under load. Default: as many as --replicas."""

    scale_at: Annotated[int, Parameter(validator=Number(gte=1, lte=100_000))] = 64
    """Open requests of one server, running and waiting, above which there should be more servers, up to --max-replicas.
    Those that are not needed for 5 minutes end."""

    cpus_per_server: Annotated[int, Parameter(validator=Number(gte=1, lte=4096))] = 1
    """CPUs of Ray that a server on a node without a GPU reserves. It computes with all that the node has."""

    @property
    def needs(self) -> dict[str, float]:
        """The resources of one server, in Ray's terms."""
        return {"GPU": 1.0} if self.nodes_with == "gpu" else {"CPU": float(self.cpus_per_server)}


def check_server_options(words: Sequence[str]) -> None:
    """Check options of `penstock serve` before any node sees them. Exits with one line."""
    if len(words) > _MAX_WORDS:
        fail(COMMAND, f"{len(words)} words; the limit is {_MAX_WORDS}")
    for word in words:
        name = word.partition("=")[0].removeprefix("--").replace("_", "-")
        if word.startswith("--") and name in _OURS:
            fail(COMMAND, f"--{name} cannot be given: {_OURS[name]}")
    app = App(name=COMMAND, help_flags=[], version_flags=[])
    app.default(_take)
    try:
        app.parse_args(list(words), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        fail(COMMAND, explain(error) or " ".join(str(error).split()))


def _take(*, options: ServeOptions = ServeOptions()) -> ServeOptions:  # noqa: B008 - frozen
    return options
