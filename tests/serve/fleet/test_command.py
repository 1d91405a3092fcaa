"""The options of `penstock ray`, and what it says where Ray is missing."""

from __future__ import annotations

import sys

import pytest

from penstock.main import app
from penstock.serve.fleet import command
from penstock.serve.fleet.command import FleetOptions, UpOptions, check_server_options
from tests.serve.fleet.fake_cluster import FakeCluster


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--replicas", "0"), "--replicas"),
        (("--replicas", "1025"), "--replicas"),
        (("--replicas", "3", "--max-replicas", "2"), "--max-replicas is 2, less than --replicas 3"),
        (("--listen", "127.0.0.1"), "write HOST:PORT"),
        (("--listen", "127.0.0.1:65536"), "a port from 1 to 65535"),
        (("--listen", "{x}:80"), "write HOST:PORT"),
        (("--name", "../x"), "small letters, digits and hyphens"),
        (("--router", "squid"), "--router"),
        (("--port", "80"), "--port cannot be given: each server takes a free port"),
        (("--api-key", "secret"), "--api-key cannot be given: other users"),
        (("--max-runing", "3"), "--max-runing. Did you mean --max-running?"),
        (("--max-running", "many"), "--max-running"),
        (("--model", "m") * 129, "258 words; the limit is 256"),
    ],
)
def test_bad_options_are_one_line_before_anything_starts(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["ray", "up", *words])
    assert ended.value.code in (1, 2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.count("\n") == 1


def test_missing_ray_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "penstock.serve.fleet.ray_cluster", raising=False)
    with pytest.raises(SystemExit):
        app(["ray", "status"])
    assert "pip install 'penstock[ray]'" in capsys.readouterr().err


def test_options_of_servers_pass() -> None:
    check_server_options(["--model", "org/name", "--max-running", "8", "--deterministic"])


def test_one_server_reserves_a_gpu_or_cpus() -> None:
    assert UpOptions().needs == {"GPU": 1.0}
    assert UpOptions(nodes_with="cpu", cpus_per_server=4).needs == {"CPU": 4.0}


def test_each_set_of_servers_has_a_router_directory() -> None:
    first, second = FleetOptions().router_settings(), FleetOptions(name="other").router_settings()
    assert first is not None
    assert second is not None
    assert first.directory != second.directory
    assert FleetOptions(router="none").router_settings() is None


def test_servers_end_although_one_cannot_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = FakeCluster("a", "b", "c")
    for number, node in enumerate("abc"):
        cluster.place(number, node)
    cluster.deaf = {0}
    cluster.comes_up(1)
    command._end(cluster, 0.0)
    assert cluster.known == {}
    assert "server 0 cannot be told to end: actor 0 does not answer" in capsys.readouterr().err
