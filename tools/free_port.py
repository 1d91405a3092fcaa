"""Finds a port for a server that a test or a measurement starts."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

_LOWEST_PORT, _NUM_PORTS = 10_000, 1 << 16
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Linux: the first and the last port, https://docs.kernel.org/networking/ip-sysctl.html"""


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
