"""The `penstock chaos` command: its options, and how it ends."""

from __future__ import annotations

import shlex
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import uvloop
from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.process.failure import fail
from penstock.tools.bench.options import Share
from penstock.tools.chaos.bad_models.fuzz import fuzz, make_models_dir
from penstock.tools.chaos.errors import COMMAND, ChaosError
from penstock.tools.chaos.ledger import Ledger
from penstock.tools.chaos.plan import Tenant
from penstock.tools.chaos.proxies import SHIPPED
from penstock.tools.chaos.report import Outcome, make_report, write_report
from penstock.tools.chaos.run import ChaosRun, RunPlan
from penstock.tools.chaos.server import started
from penstock.tools.processes import exit_on_sigterm

DEFAULT_START = (
    "--gpu none --forward-pass penstock.backend.passes.fake:PacedFakePass --kv-budget 512KB --workers 2 "
    "--hang-timeout-s 5 --drain-timeout-s 120 --log-level warning"
)
_BEHIND = {"none": (), "haproxy": ("haproxy",), "nginx": ("nginx",), "both": ("haproxy", "nginx")}


@Parameter(name="*")
@dataclass(frozen=True)
class ChaosOptions:
    """Attack a server and check its books, or load damaged models."""

    url: str | None = None
    """Your own server, such as http://127.0.0.1:8000, which nobody else uses meanwhile. Only what a client can do is
    done to it."""

    bad_models: Annotated[int, Parameter(validator=Number(gte=0, lte=1_000_000))] = 0
    """Damaged model files. Alone: load so many, made from small good models, each in a child with limits of time and
    memory; each must be refused in one line, or run. --keep-logs keeps the files that are not. With --start: put so
    many into the server's --models-dir beside good models; the good ones must notice nothing."""

    start: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """Options of `penstock serve`, in one argument: the server is started, and its processes are killed, stopped and
    restarted, and its backends upgraded, too. Pages count as growth when they are first written: give a small
    --kv-budget. Default, without --url: two workers, and the fake pass with steps of 4 ms."""

    minutes: Annotated[float, Parameter(validator=Number(gt=0, lte=1440))] = 1.0
    """How long it lasts, besides the start and the last checks."""

    requests: Annotated[int | None, Parameter(validator=Number(gte=1, lte=100_000_000))] = None
    """Requests, spread evenly over the time. Default: as many as --concurrency clients send."""

    drop_rate: Share = 0.5
    """Share of the requests whose client hangs up, at any stage."""

    seed: Annotated[int, Parameter(validator=Number(gte=0))] = 0
    """The same seed gives the same requests and faults."""

    concurrency: Annotated[int, Parameter(validator=Number(gte=1, lte=1024))] = 48
    """Clients. A flood sends 32 requests more at once."""

    prompts: Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))] = 64
    """Different requests, whose right answers are asked for first."""

    fault_every_s: Annotated[float, Parameter(validator=Number(gte=1, lte=3600))] = 6.0
    """A process is killed, stopped or restarted about so often, but not before the last fault is over."""

    behind: Literal["none", "haproxy", "nginx", "both"] = "none"
    """Proxies between the clients and two frontends, with the configurations of docs/operations."""

    proxy_configurations: Path = SHIPPED
    """Folder of haproxy.cfg and nginx.conf."""

    api_key: Annotated[tuple[str, ...], Parameter(consume_multiple=False, negative="", show_default=False)] = ()
    """Key for --url; may be repeated, each is a tenant."""

    allow_refusals: bool = False
    """Any request may be refused with 429 or 503 and Retry-After. Otherwise only floods and a key with limits may."""

    keep_logs: Path | None = None
    """New folder for the logs of the server that is started, or for damaged models that did harm. Default: a temporary
    one, which is removed."""

    report: Path | None = None
    """File for the report: JSON if its name ends so, else Markdown."""

    def check(self) -> None:
        """Raises ChaosError if options contradict each other."""
        if self.url is not None and (self.start is not None or self.behind != "none"):
            raise ChaosError("--url is a server that runs already: leave --start and --behind out")
        if self.url is not None and self.bad_models:
            raise ChaosError("--bad-models needs files of its own: use it alone, or with --start")
        if self.url is None and self.api_key:
            raise ChaosError("--api-key is for --url: a server that is started gets keys of its own")


def chaos(*, options: ChaosOptions = ChaosOptions()) -> int:
    """Run; print the report; return 1 if anything does not balance."""
    exit_on_sigterm()
    try:
        options.check()
        if options.report is not None:
            options.report.touch()
        if options.bad_models and options.start is None:
            return _fuzz(options)
        outcome = _run(options)
        report = make_report(sys.argv[1:], outcome)
        print(report.tables())
        if options.report is not None:
            write_report(options.report, report)
    except OSError as error:
        fail(COMMAND, str(error))
    except (ChaosError, ValueError) as error:
        fail(COMMAND, str(error))
    except KeyboardInterrupt:
        return 130
    return 0 if report.is_balanced else 1


def _fuzz(options: ChaosOptions) -> int:
    """Raises ChaosError."""
    outcome = fuzz(options.bad_models, options.seed, 60 * options.minutes, options.keep_logs, _say)
    print(outcome.tables())
    if options.report is not None:
        options.report.write_text(outcome.tables(), encoding="utf-8")
    return 1 if outcome.faults else 0


def _run(options: ChaosOptions) -> Outcome:
    """Raises ChaosError; ValueError for a URL that is none."""
    plan = RunPlan(
        lasts_s=60 * options.minutes,
        num_requests=options.requests,
        drop_rate=options.drop_rate,
        seed=options.seed,
        concurrency=options.concurrency,
        num_recipes=options.prompts,
        fault_every_s=options.fault_every_s,
    )
    ledger = Ledger(_say, allow_refusals=options.allow_refusals)
    if options.url is not None:
        tenants = [Tenant(f"key-{number}", key) for number, key in enumerate(options.api_key, start=1)]
        return uvloop.run(ChaosRun(plan, [options.url], tenants or [Tenant("nobody")], ledger, say=_say).run())
    with ExitStack() as stack:
        words = shlex.split(DEFAULT_START if options.start is None else options.start)
        if options.bad_models:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-chaos-")))
            words += ["--models-dir", str(make_models_dir(folder, options.bad_models, options.seed))]
        behind = _BEHIND[options.behind]
        server = stack.enter_context(started(words, behind, options.proxy_configurations, options.keep_logs))
        run = ChaosRun(plan, server.entrances, server.tenants, ledger, server=server, say=_say)
        outcome = uvloop.run(run.run())
        for fault in server.stop():
            ledger.imbalance("the server did not end as it should", fault)
        try:
            for fault in server.kill_supervisors():
                ledger.imbalance("processes outlive their supervisor", fault)
        except ChaosError as error:  # the report of the run is not lost
            ledger.imbalance("the server did not start again", str(error))
    return outcome


def _say(text: str) -> None:
    print(f"{COMMAND}: {text}", file=sys.stderr, flush=True)
