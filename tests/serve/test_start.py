"""Each process of a server imports without garbage collections, and collects garbage when it serves."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serve.serve_process import Start

_REPORT = """
import gc, json, os, sys
enable, disable, begun = gc.enable, gc.disable, []
gc.callbacks.append(lambda phase, _info: begun.extend([phase] * (phase == "start")))

def report_start():
    gc.disable = disable
    disable()
    begun.clear()
    had_numpy.append("numpy" in sys.modules)

def report_end():
    gc.enable = enable
    num_collections = len(begun)
    enable()
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    report = {
        "collections": num_collections, "had_numpy": had_numpy, "enabled": gc.isenabled(),
        "frozen": gc.get_freeze_count() > 10_000, "others": len(gc.get_objects()) > 1000,
    }
    with open(os.path.join(os.path.dirname(__file__), module + ".json"), "w") as file:
        json.dump(report, file)

had_numpy = []
gc.disable, gc.enable = report_start, report_end
"""


def test_objects_of_the_start_are_frozen_and_the_collector_is_on_in_every_process(start: Start, tmp_path: Path) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(_REPORT)
    path = os.pathsep.join(filter(None, (str(hooks), os.environ.get("PYTHONPATH"))))
    serve = start(environment={"PYTHONPATH": path})
    serve.wait_until_ready()
    reports = {file.stem: json.loads(file.read_text()) for file in hooks.glob("*.json")}
    assert serve.stop() == 0
    modules = ("main", "backend.main", "frontend.main", "frontend.worker")
    # The one collection is of what was made after the imports.
    report = {"collections": 1, "had_numpy": [False], "enabled": True, "frozen": True, "others": False}
    assert reports == {f"penstock.{module}": report for module in modules}
