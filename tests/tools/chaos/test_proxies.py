"""The shipped configurations of HAProxy and nginx, checked by the programs themselves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from penstock.process.children import find_program
from penstock.tools.chaos.errors import ChaosError
from penstock.tools.chaos.proxies import SHIPPED, Addresses, Proxy
from penstock.tools.free_port import free_port

ADDRESSES = Addresses(f"127.0.0.1:{free_port()}", "127.0.0.1:9", "127.0.0.1:10")


@pytest.mark.parametrize("name", ["haproxy", "nginx"])
def test_shipped_configuration_is_accepted_and_an_edited_one_is_used(name: str, tmp_path: Path) -> None:
    if find_program(name) is None:
        pytest.skip(f"{name} is not installed: apt-get install haproxy nginx-light")
    proxy = Proxy(name, ADDRESSES, tmp_path / "run")
    try:
        proxy.check_alive()
    finally:
        proxy.stop()
    assert proxy.process.returncode is not None
    edited = tmp_path / "edited"
    edited.mkdir()
    for path in filter(Path.is_file, SHIPPED.iterdir()):
        (edited / path.name).write_text(path.read_text() + "\nnonsense here;\n")
    with pytest.raises(ChaosError, match="nonsense"):
        Proxy(name, ADDRESSES, tmp_path / "again", edited)


def test_nginx_accepts_its_configuration_as_shipped(tmp_path: Path) -> None:
    program = find_program("nginx")
    if program is None or os.geteuid() != 0:
        pytest.skip("needs nginx, and root for the places of its files")
    shipped = [program, "-t", "-c", SHIPPED / "nginx.conf", "-g", f"pid {tmp_path}/pid;"]
    checked = subprocess.run(shipped, capture_output=True, text=True, check=False)
    assert (checked.returncode, "successful" in checked.stderr) == (0, True), checked.stderr


def test_configuration_without_the_shipped_addresses_is_refused(tmp_path: Path) -> None:
    if find_program("nginx") is None:
        pytest.skip("nginx is not installed")
    text = (SHIPPED / "nginx.conf").read_text()
    (tmp_path / "nginx.conf").write_text(text.replace("127.0.0.1:8001", "127.0.0.1:8002"))
    with pytest.raises(ChaosError, match=r"has no address 127\.0\.0\.1:8001"):
        Proxy("nginx", ADDRESSES, tmp_path / "run", tmp_path)


def test_missing_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tools.chaos.proxies.find_program", lambda _name: "/bin/true")
    with pytest.raises(ChaosError, match=r"haproxy\.cfg is missing"):
        Proxy("haproxy", ADDRESSES, tmp_path / "run", tmp_path)


def test_missing_program_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tools.chaos.proxies.find_program", lambda _name: None)
    with pytest.raises(ChaosError, match="apt-get install"):
        Proxy("nginx", ADDRESSES, tmp_path / "run")
