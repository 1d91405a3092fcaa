"""The pages of the API match the code: they have every field, error and metric, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.telemetry.metrics import Source, render
from penstock.frontend.transport.errors import ErrorKind
from penstock.shm.memory.board import BackendBoard, FrontendBoard
from tests.frontend.schemas.parameter_table import table

DOCS = Path(__file__).parents[3] / "docs"
CHAT = (DOCS / "api" / "chat-and-completions.md").read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.split(r"^## ", text.partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_error_is_in_the_table() -> None:
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \| `(\w+)` \| ", section("api.md", "Errors"), flags=re.MULTILINE)
    assert rows == [(str(kind.status), kind.value.type, kind.value.code) for kind in ErrorKind]


def test_every_field_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", CHAT))
    for body in (ChatBody, CompletionBody):
        fields = {field.name for field in msgspec.structs.fields(body)}
        assert fields <= named, fields - named


def test_every_metric_is_in_the_table() -> None:
    backend = dict.fromkeys(BackendBoard.fields, 0)
    page = render(1, [Source("m", dict.fromkeys(FrontendBoard.fields, 0), backend)]).decode()
    reported = dict(re.findall(r"^# TYPE (\w+) (\w+)$", page, flags=re.MULTILINE))
    rows = re.findall(
        r"^\| (.+?) \| (gauge|counter|histogram) \| ", section("api/metrics.md", "/metrics"), flags=re.MULTILINE
    )
    listed = {name: kind for names, kind in rows for name in re.findall(r"`(penstock_\w+)", names)}
    assert listed == reported


def test_table_of_parameters_matches_the_bodies() -> None:
    text = section("api/parameters.md", "Parameters by endpoint")
    assert table() in text, "python -m tests.frontend.schemas.parameter_table prints it"
