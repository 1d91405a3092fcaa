"""`penstock bench routers`: a router that keeps groups together lets its servers compute less than round robin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.main import app
from penstock.process.children import find_program


@pytest.mark.timeout(240)
def test_prompts_of_a_group_are_computed_once(tmp_path: Path) -> None:
    if find_program("haproxy") is None or find_program("nginx") is None:
        pytest.skip("not installed: apt-get install haproxy nginx-light")
    report = tmp_path / "report.json"
    few = ["--servers", "2", "--requests", "40", "--sequential", "5", "--stream-tokens", "16"]
    with pytest.raises(SystemExit) as ended:
        app(["bench", "routers", *few, "--json", str(report)])
    assert not ended.value.code
    one, round_robin, *shipped = json.loads(report.read_text())["sections"]["routers"]
    assert [row["router"] for row in shipped] == ["HAProxy", "nginx"]
    # 8 prefixes, computed once by one server and most twice by two that take turns: 1.6 to 1.8 times as many tokens,
    # 1.38 on a busy machine.
    assert round_robin["computed_tokens"] > 1.25 * one["computed_tokens"]
    for row in shipped:
        assert row["computed_tokens"] < 1.2 * one["computed_tokens"]


def test_another_routers_command_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["bench", "routers", "--servers", "1"])
    assert "--servers" in capsys.readouterr().err
