"""HAProxy and nginx, with the configurations of docs/operations."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import penstock
from penstock.tools.chaos.child import Child
from penstock.tools.chaos.errors import ChaosError

SHIPPED = Path(penstock.__file__).parents[1] / "docs" / "operations"
"""Folder of the configurations. A wheel has no docs, so it exists only in a checkout."""
_SYSTEM_FOLDERS = ":/usr/sbin:/usr/local/sbin"
"""Folders where Debian has proxies and a user's PATH does not look."""
_CHECKS_EVERY_S = {"haproxy": (1.0, 1.0, 2.0, 2.0), "nginx": ()}
"""Periods of the health checks in the shipped configurations: of /ready and of /health, on both frontends."""
_CHECK_MARGIN_S = 1.0
"""Totals lag, and a proxy spreads its checks."""


_LOWEST_PORT, _NUM_PORTS = 10_000, 1 << 16
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Linux: the first and the last port, https://docs.kernel.org/networking/ip-sysctl.html"""

_VARIABLE = re.compile(r"\$\{(PENSTOCK_[A-Z_]+)\}")
"""nginx has variables of its own, which stay."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """The address of a proxy, and the frontends behind it, as HOST:PORT."""

    listen: str
    frontend_a: str
    frontend_b: str

    def variables(self) -> dict[str, str]:
        return {
            "PENSTOCK_LISTEN": self.listen,
            "PENSTOCK_FRONTEND_A": self.frontend_a,
            "PENSTOCK_FRONTEND_B": self.frontend_b,
        }


def free_port() -> int:
    """Return a loopback port that is free now and, where possible, outside the range of outgoing connections.

    The kernel gives ports of its ephemeral range to connections at any moment. If that range leaves no port, or the
    system does not report it, the kernel chooses.
    """
    try:
        first, last = map(int, _EPHEMERAL_RANGE.read_text().split())
        outside = (*range(_LOWEST_PORT, first), *range(last + 1, _NUM_PORTS))
    except OSError:
        outside = ()
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", secrets.choice(outside) if outside else 0))
            port: int = probe.getsockname()[1]
            return port


def find_program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + _SYSTEM_FOLDERS)


class Proxy(Child):
    """A running proxy. When it is terminated it does not wait for its connections."""

    def __init__(self, name: str, addresses: Addresses, directory: Path, configurations: Path = SHIPPED) -> None:
        """directory is its own, for its log and its temporary files. Raises ChaosError."""
        self.name, self.url = name, f"http://{addresses.listen}"
        program = find_program(name)
        if program is None:
            raise ChaosError(f"{name} is not installed; on Debian: apt-get install haproxy nginx-light")
        directory.mkdir()
        check, run, environment = _COMMANDS[name](program, addresses, directory, configurations)
        checked = subprocess.run(check, env=environment, capture_output=True, text=True, check=False)
        if checked.returncode != 0:
            raise ChaosError(f"{name} refuses its configuration: {(checked.stderr or checked.stdout).strip()[-500:]}")
        super().__init__(run, environment, directory / "log")

    def most_checks(self, lasts_s: float) -> int:
        """Return the most health checks that it sends in this time, while all are answered."""
        return sum(int((lasts_s + _CHECK_MARGIN_S) / every_s) + 1 for every_s in _CHECKS_EVERY_S[self.name])


_Command = tuple[list[str], list[str], dict[str, str]]
"""Command that checks the configuration, command that runs it in the foreground, and the environment of both."""


def _haproxy(program: str, addresses: Addresses, _directory: Path, configurations: Path) -> _Command:
    path = _existing(configurations / "haproxy.cfg")
    return [program, "-c", "-f", path], [program, "-db", "-f", path], addresses.variables()


def _nginx(program: str, addresses: Addresses, directory: Path, configurations: Path) -> _Command:
    template = Path(_existing(configurations / "nginx.conf")).read_text(encoding="utf-8")
    path = directory / "nginx.conf"
    variables = addresses.variables() | {"PENSTOCK_NGINX_TEMP": str(directory)}
    path.write_text(_VARIABLE.sub(lambda found: variables[found[1]], template), encoding="utf-8")
    common = [program, "-e", "stderr", "-p", str(directory), "-c", str(path)]
    foreground = ["-g", f"daemon off; pid {directory}/pid;"]
    return [*common, "-t", *foreground], [*common, *foreground], {}


_COMMANDS = {"haproxy": _haproxy, "nginx": _nginx}


def _existing(path: Path) -> str:
    if not path.is_file():
        raise ChaosError(f"{path} is missing; --proxy-configurations names the folder of haproxy.cfg and nginx.conf")
    return str(path)
