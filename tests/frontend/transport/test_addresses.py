"""The addresses that a TCP port listens on."""

from __future__ import annotations

import socket

import pytest

from penstock.frontend.main import listening_socket, open_to_everyone, read_access
from penstock.frontend.options import FrontendOptions


def test_every_ipv6_address_is_also_every_ipv4_address() -> None:
    listening = listening_socket(FrontendOptions(host="::", port=0), "frontend")
    with listening:
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, listening.getsockname()[1]), timeout=10):
                accepted, _ = listening.accept()
                accepted.close()


@pytest.mark.parametrize(
    ("host", "keys", "is_warned"),
    [("0.0.0.0", (), True), ("::", (), True), ("0.0.0.0", ("sk",), False), ("127.0.0.1", (), False)],  # noqa: S104
)
def test_address_of_other_machines_without_a_key_is_warned_of(
    host: str, keys: tuple[str, ...], is_warned: bool
) -> None:
    options = FrontendOptions(host=host, port=0, api_key=keys)
    with listening_socket(options, "frontend") as listening:
        warning = open_to_everyone(read_access(options, "frontend"), listening)
    assert (warning is not None) == is_warned
    assert warning is None or host in warning
