"""`penstock ray up`, `status` and `down`: servers on the nodes of a Ray cluster, with a router in front of them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import App, Parameter

from penstock.process.failure import fail
from penstock.process.options import ENV_PREFIX
from penstock.serve.fleet.cluster import ClusterError, Phase
from penstock.serve.fleet.keeper import Bounds, CannotStart, Keeper, Scaling
from penstock.serve.fleet.options import COMMAND, FleetOptions, UpOptions, check_server_options
from penstock.serve.fleet.router import Router, RouterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.serve.fleet.cluster import Cluster, Server
    from penstock.serve.fleet.ray_cluster import RayCluster

_TURN_EVERY_S = 1.0
_DOWN_EVERY_S = 0.2
_PASSED_ON = (f"{ENV_PREFIX}API_KEY", f"{ENV_PREFIX}ADMIN_KEY", "HF_TOKEN", "HF_HOME")
"""Variables that servers receive: secrets, which no command line should hold, and where models are."""

app = App(name="ray", help="Runs servers on the nodes of a Ray cluster, one on each, behind HAProxy or nginx.")


@app.command
def up(
    *server: Annotated[str, Parameter(allow_leading_hyphen=True, show_env_var=False)],
    options: UpOptions = UpOptions(),  # noqa: B008 - frozen
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
def status(*, options: FleetOptions = FleetOptions(), json: bool = False) -> None:  # noqa: B008 - frozen
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
def down(*, options: FleetOptions = FleetOptions(), timeout_s: float = 60.0) -> None:  # noqa: B008 - frozen
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
