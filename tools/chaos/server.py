"""The attacked server: `penstock serve`, a second frontend on its backend, and the proxies before both."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from penstock.backend.model_names import DEMO_MODEL
from penstock.process.children import module_argv, stat_fields
from penstock.process.options import make_app, to_argv
from penstock.serve.options import ServeOptions, backend_options, frontend_options, one_or_several
from penstock.tools.bench.load_generator.http_client import HttpClient
from penstock.tools.chaos.census import ELASTIC_ROLE
from penstock.tools.chaos.counters import is_ready
from penstock.tools.chaos.errors import COMMAND, ChaosError
from penstock.tools.chaos.plan import Tenant
from penstock.tools.chaos.proxies import SHIPPED, Addresses, Child, Proxy
from penstock.tools.free_port import free_port
from penstock.tools.processes import module_of, session_members

_MODULES = {
    "penstock.main": "supervisor",
    "penstock.backend.main": "backend",
    "penstock.frontend.main": "frontend",
    "penstock.frontend.worker": "worker",
    "penstock.backend.structured_output.compile_child": ELASTIC_ROLE,
    "penstock.serve.sleeping_models.sizes": "estimate of sizes",
}
_DECIDED = ("host", "port", "socket", "uds", "listen_fd", "api_key", "api_key_file", "ssl_certfile", "ssl_keyfile")
_IN_FLIGHT_OF_LIMITED = 12
_SLEEP_AFTER_S = "2"
"""Models that may sleep do so after each round, so that the census finds the same processes."""
_DRAIN_TIMEOUT_S = 120
"""Longer than the default, which answers on a busy machine outlive, above all of models that have to wake first."""
_START_TIMEOUT_S = 600.0
_ORPHANS_TIMEOUT_S = 10.0
_POLL_S = 0.1


def parse_serve_options(words: Sequence[str]) -> ServeOptions:
    """Read the options of `penstock serve`. A wrong one ends the process with one line.

    Raises ChaosError for an option that the run decides.
    """
    parsed: list[ServeOptions] = []
    app = make_app(f"{COMMAND} --start", "")

    @app.default
    def _take(*, options: ServeOptions = ServeOptions()) -> None:  # noqa: B008 - frozen
        parsed.append(options)

    app(list(words), result_action="return_value")
    if not parsed:
        raise ChaosError(f'--start "{shlex.join(words)}" has no options to start with')
    default = ServeOptions()
    for name in _DECIDED:
        if getattr(parsed[0], name) != getattr(default, name):
            raise ChaosError(f"--start has --{name.replace('_', '-')}, which {COMMAND} decides itself; leave it out")
    return one_or_several(parsed[0])


class Server:
    """`penstock serve` (frontend A), `frontend` (B) on the same backends, and proxies, all on loopback.

    Models that sleep have no frontend B: their workers share a table with the supervisor.
    """

    def __init__(self, words: Sequence[str], behind: Sequence[str], directory: Path, configurations: Path) -> None:
        """words are options of `penstock serve`; directory is this run's own. Raises ChaosError."""
        options = parse_serve_options(words)
        if options.may_sleep and not options.sleep_after_s:
            words = [*words, "--sleep-after-s", _SLEEP_AFTER_S]
        if options.drain_timeout_s == ServeOptions().drain_timeout_s:
            words = [*words, "--drain-timeout-s", str(_DRAIN_TIMEOUT_S)]
            options = dataclasses.replace(options, drain_timeout_s=_DRAIN_TIMEOUT_S)
        self.directory = directory
        self.runtime = directory / "run"
        self.runtime.mkdir(mode=0o700)
        self._keys = directory / "keys"
        self.tenants = [
            Tenant("alice", secrets.token_hex(16)),
            Tenant("bob", secrets.token_hex(16)),
            Tenant("carol", secrets.token_hex(16), is_limited=True),
        ]
        self._has_spare_key = False
        self._write_keys()
        state = {"PENSTOCK_STATE_DIR": str(directory / "state")}
        self._environment = os.environ | state | {"XDG_RUNTIME_DIR": str(self.runtime)}
        port_a, self._port_b = free_port(), free_port()
        self.url_a, self.url_b = f"http://127.0.0.1:{port_a}", f"http://127.0.0.1:{self._port_b}"
        self.options = options = dataclasses.replace(
            options, api_key_file=self._keys, socket=self.runtime / "s.sock", port=self._port_b
        )
        decided = ["--port", str(port_a), "--socket", str(options.socket), "--api-key-file", str(self._keys)]
        if options.model is None and not options.has_names:
            decided += ["--model", DEMO_MODEL]
        self._serve_argv = module_argv("penstock.main", ["serve", *words, *decided])
        self.serve = self._start_serve()
        self._argv_b = to_argv(frontend_options(options, backend_options(options)))
        self.frontend_b: Child | None = None
        self.proxies: list[Proxy] = []
        self._behind, self._configurations = behind, configurations

    def _start_serve(self) -> Child:
        return Child("penstock serve", self._serve_argv, self._environment, self.directory / "serve.log")

    def start_upgrade(self) -> Child:
        argv = module_argv("penstock.main", ["upgrade", "--server", str(self.options.socket)])
        return Child("penstock upgrade", argv, self._environment, self.directory / "upgrade.log")

    def start_frontend_b(self) -> None:
        """Start it as the first or as the next one; it takes the same port."""
        log = self.directory / "frontend.log"
        argv = module_argv("penstock.frontend.main", self._argv_b)
        self.frontend_b = Child("frontend B", argv, self._environment, log)

    def start_proxies(self) -> None:
        """Raises ChaosError."""
        for name in self._behind:
            addresses = Addresses(
                f"127.0.0.1:{free_port()}", self.url_a.removeprefix("http://"), self.url_b.removeprefix("http://")
            )
            self.proxies.append(Proxy(name, addresses, self.directory / name, self._configurations))

    @property
    def entrances(self) -> list[str]:
        """Addresses for clients: the proxies, or else frontend A, whose socket outlives each of its processes."""
        return [proxy.url for proxy in self.proxies] or [self.url_a]

    def most_checks(self, lasts_s: float) -> int:
        """Return the most health checks of proxies that may be answered in this time, if all are."""
        return sum(proxy.most_checks(lasts_s) for proxy in self.proxies)

    def check_alive(self) -> None:
        """Raises ChaosError if a process that must not end has ended: the supervisor or a proxy."""
        self.serve.check_alive()
        for proxy in self.proxies:
            proxy.check_alive()

    def roles(self) -> dict[str, list[int]]:
        """The pids of all our processes except zombies and proxies, by role. The children of a role have a role too."""
        found: dict[str, list[int]] = {}
        for pid, state in self._processes():
            if state != "Z":
                found.setdefault(_role(pid), []).append(pid)
        return found

    def zombies(self) -> list[int]:
        return [pid for pid, state in self._processes() if state == "Z"]

    def _children(self) -> list[Child]:
        """The processes that we started, in the order in which they end; without the proxies."""
        return [child for child in (self.frontend_b, self.serve) if child is not None]

    def _processes(self) -> Iterator[tuple[int, str]]:
        """Yield the pid and the state of all of our processes except proxies."""
        for child in self._children():
            yield from session_members(child.pid).items()

    def frontend_a_pid(self) -> int | None:
        """The frontend of `serve`; None while it is being restarted."""
        return next((pid for pid in session_members(self.serve.pid) if _role(pid) == "frontend"), None)

    def reload_keys(self) -> None:
        """Add a key or take it away again, and send SIGHUP to both frontends."""
        self._has_spare_key = not self._has_spare_key
        self._write_keys()
        for child in self._children():
            child.process.send_signal(signal.SIGHUP)

    def _write_keys(self) -> None:
        lines = [
            f"{tenant.api_key} name={tenant.name}"
            + (f" requests_in_flight={_IN_FLIGHT_OF_LIMITED}" if tenant.is_limited else "")
            for tenant in self.tenants
        ]
        if self._has_spare_key:
            lines.append(f"{secrets.token_hex(16)} name=spare requests_in_flight=1")
        draft = self._keys.with_suffix(".new")
        draft.write_text("\n".join(lines) + "\n")
        draft.chmod(0o600)
        draft.replace(self._keys)

    def stop(self) -> list[str]:
        """Stop everything, and return the processes that did not end properly."""
        faults = []
        for proxy in self.proxies:
            proxy.stop()
        for child in self._children():
            status = child.stop()
            if status != 0:
                faults.append(f"{child.name} ended with status {status}: {child.log_text()[-300:]}")
            if left := child.kill_rest():
                faults.append(f"{child.name} left processes behind: {left}")
        paths = [path for path in self.runtime.rglob("*") if not path.is_dir() and path.suffix != ".lock"]
        if files := sorted(str(path.relative_to(self.runtime)) for path in paths):
            faults.append(f"files are left behind: {', '.join(files)}")
        return faults

    def kill_supervisors(self) -> list[str]:
        """Start the server again after `stop`, kill its supervisor while it starts and when it is ready, and return
        what outlives it. Raises ChaosError."""
        faults = []
        for waits in (False, True):
            self.serve = self._start_serve()
            deadline_s = time.monotonic() + _START_TIMEOUT_S
            while len(session_members(self.serve.pid)) < 2 or (waits and not asyncio.run(_is_up(self.url_a))):
                self.serve.check_alive()
                if time.monotonic() > deadline_s:
                    raise ChaosError(f"the server was not ready again in {_START_TIMEOUT_S:g} s")
                time.sleep(_POLL_S)
            self.serve.process.kill()
            self.serve.process.wait()
            deadline_s = time.monotonic() + _ORPHANS_TIMEOUT_S
            while (left := session_members(self.serve.pid)) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
            if left:
                roles = ", ".join(f"{_role(pid)} {pid}" for pid in left)
                faults.append(f"{_ORPHANS_TIMEOUT_S:g} s after SIGKILL of the supervisor: {roles}")
                self.serve.kill_rest()
        return faults

    def tracebacks(self) -> Iterator[str]:
        """The first lines of unexpected errors in our processes' logs."""
        for child in self._children():
            if (place := (log := child.log_text()).find("Traceback (most")) >= 0:
                yield log[max(0, place - 200) : place + 1500]


def _role(pid: int) -> str:
    """The role of a process.

    A child that a process forked has its parent's command line: it is "child of" that role.
    """
    module = module_of(pid)
    role = _MODULES.get(module, "other")
    try:
        parent = int(stat_fields(pid)[1])
    except ProcessLookupError:
        parent = 0
    is_forked = parent != os.getpid() and module and module_of(parent) == module
    return f"child of {role}" if is_forked else role


async def _is_up(url: str) -> bool:
    http = HttpClient(url)
    try:
        return await is_ready(http)
    finally:
        http.close()


@contextmanager
def started(
    words: Sequence[str], behind: Sequence[str], configurations: Path = SHIPPED, keep_in: Path | None = None
) -> Iterator[Server]:
    """A server whose processes have been started; the caller waits until they are ready. At exit all of it is gone.

    Its files are in keep_in and stay, or in a temporary folder. Raises ChaosError.
    """
    with ExitStack() as stack:
        if keep_in is not None:
            directory = keep_in.resolve()
            directory.mkdir(parents=True)
        else:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-chaos-")))
        server = Server(words, behind, directory, configurations)
        stack.callback(server.stop)
        yield server
