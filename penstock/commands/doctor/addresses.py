"""The addresses where the server listens: the backend's socket with its directory, and the port."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2

from penstock.commands.doctor.finding import Finding, Level
from penstock.process.cache_directory import cache_directory
from penstock.process.private_directory import Trust, UnsafeDirectory, check_directory
from penstock.shm.link.listening_address import AddressInUse, CannotListen, check_free

_ANSWER_TIMEOUT_S = 2.0
_MAX_MESSAGE = 200


def examine_addresses(socket_path: Path, host: str, port: int) -> Iterator[Finding]:
    yield backend_socket(socket_path)
    yield http_port(host, port)
    yield cache()


def backend_socket(path: Path) -> Finding:
    subject = "backend's socket"
    try:
        check_free(path)
    except AddressInUse as error:
        return Finding(Level.NOTE, subject, str(error), "connect a frontend to it, or give --socket another path")
    except CannotListen as error:
        return Finding(Level.ERROR, subject, str(error), "give --socket a path in a directory that only you can enter")
    return Finding(Level.OK, subject, f"{path} is free, and no other user can reach it")


def http_port(host: str, port: int) -> Finding:
    subject = f"port {port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        socket.create_server(address[:2], family=family).close()
    except socket.gaierror:
        return Finding(Level.ERROR, subject, f"{host} is not an address of this machine", "give --host 127.0.0.1")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = f"end the program (ss -ltnp 'sport = {port}' names it), or give --port another number"
            return Finding(Level.ERROR, subject, f"in use on {host}{whose(str(address[0]), port)}", remedy)
        return Finding(
            Level.ERROR, subject, f"cannot be used on {host}: {error.strerror}", "give --port another number"
        )
    return Finding(Level.OK, subject, f"free on {host}")


def whose(address: str, port: int) -> str:
    """Describe a Penstock that listens there, to follow "in use"; empty for another program, or behind TLS."""
    try:
        ready = httpx2.get(
            f"http://{f'[{address}]' if ':' in address else address}:{port}/ready",
            timeout=_ANSWER_TIMEOUT_S,
            trust_env=False,
        )
        answer = ready.json()
        if ready.status_code == httpx2.codes.OK:
            return " by a Penstock that is ready" if answer["status"] == "ready" else ""
        return f" by a Penstock that is not ready: {' '.join(str(answer['error']['message']).split())[:_MAX_MESSAGE]}"
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError):
        return ""


def cache() -> Finding:
    subject = "cache directory"
    try:
        directory = cache_directory()
        check_directory(directory, Trust.READABLE)
    except (OSError, UnsafeDirectory) as error:
        remedy = "mend its owner and mode, or set XDG_CACHE_HOME: kernels are otherwise compiled at each start"
        return Finding(Level.WARNING, subject, str(error), remedy)
    return Finding(Level.OK, subject, f"{directory} can be written by you alone")
