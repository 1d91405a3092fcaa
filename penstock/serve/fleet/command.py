"""`penstock ray up`, `status` and `down`: servers on the nodes of a Ray cluster, with a router in front of them.

Its options, and those of `penstock serve` that it accepts, come first.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number

from penstock.frontend.endpoints.responses.storage.state_files import default_state_dir
from penstock.process.failure import fail
from penstock.process.options import ENV_PREFIX
from penstock.serve.fleet.cluster import MAX_SERVERS, ClusterError, Phase
from penstock.serve.fleet.keeper import Bounds, CannotStart, Keeper, Scaling
from penstock.serve.fleet.router import Router, RouterError, RouterKind, RouterSettings
from penstock.serve.foreign_options import explain
from penstock.serve.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.serve.fleet.cluster import Cluster, Server
    from penstock.serve.fleet.ray_cluster import RayCluster


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


_TURN_EVERY_S = 1.0
_DOWN_EVERY_S = 0.2
_PASSED_ON = (f"{ENV_PREFIX}API_KEY", f"{ENV_PREFIX}ADMIN_KEY", "HF_TOKEN", "HF_HOME")
"""Variables that servers receive: secrets, which no command line should hold, and where models are."""

app = App(name="ray", help="Runs servers on the nodes of a Ray cluster, one on each, behind HAProxy or nginx.")


@app.command
def up(
    *server: Annotated[str, Parameter(allow_leading_hyphen=True, show_env_var=False)],
    options: UpOptions = UpOptions(),
) -> None:
    """Places servers, replaces lost ones, and tells the router, until it is stopped.

    Servers and router outlive it: the next call goes on where this one ends. `penstock ray down` ends them.

    Parameters
    ----------
    server
        Options of `penstock serve`, such as --model org/name, for each server.
    """
    most = options.max_replicas or options.replicas
    if most < options.replicas:
        fail(COMMAND, f"--max-replicas is {most}, less than --replicas {options.replicas}")
    check_server_options(server)
    router = _router(options)
    # A port of 0: several servers may run on one machine, as in a rehearsal.
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    cluster = _connect(options, options.needs, (*server, "--port", "0"), environment)
    _claim(cluster)

    def publish(servers: Sequence[Server]) -> None:
        if router is not None:
            router.apply(servers)

    bounds = Bounds(options.replicas, most, options.scale_at if most > options.replicas else 0)
    keeper = Keeper(cluster, Scaling(bounds), publish, _log)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        _keep(keeper, options, stopped)
    except CannotStart as error:
        try:
            _end(cluster, 0.0)
            if router is not None and options.router_reload is None:
                router.stop()
        except (ClusterError, RouterError) as left:
            _log(f"{left}; `penstock ray down` ends what is left")
        fail(COMMAND, f"a server does not start: {error}")
    except RouterError as error:  # of the first turn: a later one is logged and tried again
        fail(COMMAND, str(error))
    _log("stops; servers and router go on. `penstock ray up` continues, `penstock ray down` ends them")


def _keep(keeper: Keeper, options: UpOptions, stopped: threading.Event) -> None:
    """Turn until it is stopped. Raises CannotStart, and RouterError in the first turn."""
    is_first, is_announced = True, False
    while not stopped.is_set():
        try:
            keeper.turn(time.monotonic())
            if not is_announced and len(keeper.servers) >= options.replicas:
                is_announced = True
                address = f"http://{options.listen}/v1" if options.router != "none" else "no router"
                print(f"Ready: {address}", flush=True)
        except RouterError as error:
            if is_first:
                raise
            _log(str(error))
        is_first = False
        stopped.wait(_TURN_EVERY_S)


@app.command
def status(*, options: FleetOptions = FleetOptions(), json: bool = False) -> None:
    """Says which servers there are, where, and how many requests they have open. Exit status 1: none is up.

    Parameters
    ----------
    json
        One JSON object a line, with a `node_id`.
    """
    cluster = _connect(options, {})
    try:
        reports = cluster.reports(sorted(cluster.numbers()))
    except ClusterError as error:
        fail(COMMAND, str(error))
    for number, report in sorted(reports.items()):
        if json:
            print(msgspec.json.encode({"number": number, "report": report}).decode())
        elif report is not None:
            where = "-" if report.server is None else report.server.address
            print(f"{number:4}  {report.phase:8}  {where:21}  node {report.node_id[:8]}  {report.num_open} open")
    sys.exit(0 if any(report is not None and report.phase is Phase.UP for report in reports.values()) else 1)


@app.command
def down(*, options: FleetOptions = FleetOptions(), timeout_s: float = 60.0) -> None:
    """Ends the router and all servers, once their streams have ended.

    Parameters
    ----------
    timeout_s
        Seconds after which a server that still drains is killed.
    """
    router, cluster = _router(options), _connect(options, {})
    _claim(cluster)
    try:
        if router is not None and options.router_reload is None:
            router.stop()
        cluster.want_nodes(0)
        _end(cluster, timeout_s)
    except (ClusterError, RouterError) as error:
        fail(COMMAND, str(error))


def _end(cluster: Cluster, timeout_s: float) -> None:
    """Drain all servers, and kill those that have not ended in time. Raises ClusterError."""
    numbers = cluster.numbers()
    deadline_s = time.monotonic() + timeout_s
    for number in numbers:
        try:
            cluster.drain(number)
        except ClusterError as error:  # of this server: it is killed if it has not ended in time
            _log(f"server {number} cannot be told to end: {error}")
    while numbers:
        reports = cluster.reports(sorted(numbers))
        is_late = time.monotonic() >= deadline_s
        for number in list(numbers):
            report = reports.get(number)
            has_ended = number in reports and (report is None or report.phase in (Phase.ENDED, Phase.FAILED))
            if has_ended or is_late:
                cluster.remove(number)
                numbers.discard(number)
                _log(f"server {number} {'has ended' if has_ended else 'is killed'}")
        time.sleep(_DOWN_EVERY_S if numbers else 0.0)


def _router(options: FleetOptions) -> Router | None:
    settings = options.router_settings()
    try:
        return None if settings is None else Router(settings)
    except RouterError as error:
        fail(COMMAND, str(error))


def _connect(
    options: FleetOptions,
    needs: Mapping[str, float],
    server_options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> RayCluster:
    try:
        from penstock.serve.fleet.ray_cluster import RayCluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        fail(COMMAND, "Ray is not installed: pip install 'penstock[ray]', on all nodes with the same version")
    try:
        return RayCluster(options.name, options.address, needs, server_options, environment)
    except ClusterError as error:
        fail(COMMAND, str(error))


def _claim(cluster: RayCluster) -> None:
    """Two keepers would place servers twice, and one would restart what another ends. Exits with one line."""
    try:
        cluster.claim()
    except ClusterError as error:
        fail(COMMAND, str(error))


def _log(message: str) -> None:
    print(f"{COMMAND}: {message}", file=sys.stderr, flush=True)
