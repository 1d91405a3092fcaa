"""Options stand in groups in --help, whichever command takes them."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Annotated

import pytest
from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.process.options import grouped, make_app
from penstock.serve.options import ServeOptions


def help_of(options: type, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Return the options by the title of their group."""
    app = make_app("it", "Does it.")

    @app.default
    def run(*, options: object = None) -> None: ...

    run.__annotations__["options"] = options
    with pytest.raises(SystemExit):
        app(["--help"])
    groups: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if title := re.match(r"╭─ (.+?) ─", line):
            groups[title[1]] = []
        elif option := re.match(r"│ (--[\w-]+)", line):
            list(groups.values())[-1].append(option[1])
    return groups


@Parameter(name="*")
@grouped({"Access": "key", "Used most": "size"})
@dataclass(frozen=True)
class Options:
    key: str = "none"
    size: Annotated[int, Parameter(validator=Number(gte=1))] = 1


@Parameter(name="*")
@grouped({"Processes": "workers"})
@dataclass(frozen=True)
class More(Options):
    workers: int = 1


def test_groups_have_a_fixed_order_and_hold_inherited_options(capsys: pytest.CaptureFixture[str]) -> None:
    found = help_of(More, capsys)
    expected = [("Used most", ["--size"]), ("Access", ["--key"]), ("Processes", ["--workers"])]
    assert [item for item in found.items() if item[0] not in ("Commands",)] == expected


def test_every_option_of_the_server_is_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    found = help_of(ServeOptions, capsys)
    found.pop("Commands", None)
    listed = [option for options in found.values() for option in options]
    hidden = {
        "--beside-another",
        "--hand-over-fds",
        "--adapters-fd",
        "--heartbeat-fd",
        "--listen-fd",
        "--models-fd",
        "--persist-kv-fd",
        "--recorder-fd",
        "--turn-fd",
        "--weights-fds",
    }
    hidden.add("--models")  # it is --model, repeated
    assert sorted(listed) == sorted({f"--{item.name.replace('_', '-')}" for item in fields(ServeOptions)} - hidden)
    assert next(iter(found)) == "Used most"
    assert len(found["Used most"]) == 11


def test_unknown_title_and_missing_option_are_refused() -> None:
    @dataclass
    class Other:
        key: str = ""

    with pytest.raises(KeyError, match="Secrets"):
        grouped({"Secrets": "key"})
    with pytest.raises(KeyError, match="key"):
        grouped({"Access": "other"})(Other)
