"""The processes that a run starts, and those of them that are proxies: HAProxy and nginx, with the configurations of
docs/operations."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import penstock
from penstock.process.children import find_program
from penstock.tools.chaos.errors import ChaosError
from penstock.tools.processes import Child as OwnedProcess

SHIPPED = Path(penstock.__file__).parents[1] / "docs" / "operations"
"""Folder of the configurations. A wheel has no docs, so it exists only in a checkout."""
_CHECKS_EVERY_S = {"haproxy": (1.0, 1.0, 2.0, 2.0), "nginx": ()}
"""Periods of the health checks in the shipped configurations: of /ready and of /health, on both frontends."""
_CHECK_MARGIN_S = 1.0
"""Totals lag, and a proxy spreads its checks."""


class Child(OwnedProcess):
    """A process in a session of its own, so that all of its descendants can be found."""

    failure = ChaosError

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """log receives its output, after what is there."""
        self._path = log
        with log.open("ab") as file:
            super().__init__(name, argv, environment, file, has_session=True)

    def log_text(self) -> str:
        return self._path.read_text(errors="replace")


@dataclass(frozen=True, slots=True)
class Addresses:
    """The address of a proxy, and the frontends behind it, as HOST:PORT."""

    listen: str
    frontend_a: str
    frontend_b: str

    def variables(self) -> dict[str, str]:
        names = ("LISTEN", "FRONTEND_A", "FRONTEND_B")
        return {f"PENSTOCK_{name}": address for name, address in zip(names, astuple(self), strict=True)}


class Proxy(Child):
    """A running proxy. When it is terminated it does not wait for its connections."""

    def __init__(self, name: str, addresses: Addresses, directory: Path, configurations: Path = SHIPPED) -> None:
        """directory is its own, for its log and its temporary files. Raises ChaosError."""
        self.url = f"http://{addresses.listen}"
        program = find_program(name)
        if program is None:
            raise ChaosError(f"{name} is not installed; on Debian: apt-get install haproxy nginx-light")
        directory.mkdir()
        check, run, environment = _COMMANDS[name](program, addresses, directory, configurations)
        checked = subprocess.run(check, env=environment, capture_output=True, text=True, check=False)
        if checked.returncode != 0:
            raise ChaosError(f"{name} refuses its configuration: {(checked.stderr or checked.stdout).strip()[-500:]}")
        super().__init__(name, run, environment, directory / "log")

    def most_checks(self, lasts_s: float) -> int:
        """Return the most health checks that it sends in this time, while all are answered."""
        return sum(int((lasts_s + _CHECK_MARGIN_S) / every_s) + 1 for every_s in _CHECKS_EVERY_S[self.name])


_Command = tuple[list[str], list[str], dict[str, str]]
"""Command that checks the configuration, command that runs it in the foreground, and the environment of both."""


def _haproxy(program: str, addresses: Addresses, _directory: Path, configurations: Path) -> _Command:
    path = _existing(configurations / "haproxy.cfg")
    return [program, "-c", "-f", path], [program, "-db", "-f", path], addresses.variables()


def _nginx(program: str, addresses: Addresses, directory: Path, configurations: Path) -> _Command:
    shipped = Path(_existing(configurations / "nginx.conf"))
    ours = dict(zip(("127.0.0.1:8080", "127.0.0.1:8000", "127.0.0.1:8001"), astuple(addresses), strict=True))
    parts: list[str] = re.split(f"({'|'.join(map(re.escape, ours))})", shipped.read_text(encoding="utf-8"))
    if missing := ours.keys() - set(parts):
        raise ChaosError(f"{shipped} has no address {min(missing)}, in whose place the run puts one of its own")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {directory}/{kind};\n" for kind in kinds)
    path = directory / "nginx.conf"  # with places of its own for temporary files: the usual ones are root's
    text = "".join(ours.get(part, part) for part in parts)
    path.write_text(text.replace("http {\n", f"http {{\n{places}", 1), encoding="utf-8")
    common = [program, "-e", "stderr", "-p", str(directory), "-c", str(path)]
    foreground = ["-g", f"daemon off; pid {directory}/pid;"]
    return [*common, "-t", *foreground], [*common, *foreground], {}


_COMMANDS = {"haproxy": _haproxy, "nginx": _nginx}


def _existing(path: Path) -> str:
    if not path.is_file():
        raise ChaosError(f"{path} is missing; --proxy-configurations names the folder of haproxy.cfg and nginx.conf")
    return str(path)
