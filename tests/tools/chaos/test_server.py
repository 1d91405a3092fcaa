"""The attacked server is started with the options of --start, and its second frontend knows all backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.tools.chaos import server
from penstock.tools.chaos.server import Server

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class FakeChild:
    def __init__(self, name: str, argv: Sequence[str], _environment: object, _log: Path) -> None:
        started[name] = list(argv)


started: dict[str, list[str]] = {}


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (["--model", "x.gguf"], []),
        (["--model", "x.gguf", "--replicas", "2", "--lora-modules", "tuned=dir"], ["--replica-socket", "s-2.sock"]),
        (["--model", "x.gguf", "--embedding-model", "y"], ["--embedding-socket", "s-embedding.sock"]),
        (["--model", "a=x.gguf", "--model", "b=y"], ["--model-socket", "s-m2.sock"]),
    ],
)
def test_options_reach_the_server_and_both_frontends_know_its_backends(
    words: list[str], known: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "Child", FakeChild)
    Server(words, (), tmp_path, tmp_path).start_frontend_b()
    argv = started["penstock serve"]
    place = argv.index("serve") + 1
    assert argv[place : place + len(words)] == words
    other = " ".join(started["frontend B"])
    assert all(word in other for word in ["s.sock", *known])
    assert f"--port {argv[argv.index('--port') + 1]}" not in other


def test_models_that_sleep_do_so_after_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "Child", FakeChild)
    (tmp_path / "models" / "x").mkdir(parents=True)
    (tmp_path / "models" / "x" / "config.json").write_text("{}")
    Server(["--models-dir", str(tmp_path / "models")], (), tmp_path, tmp_path)
    assert started["penstock serve"].count("--sleep-after-s") == 1
