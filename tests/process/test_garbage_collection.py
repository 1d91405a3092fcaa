"""No garbage is collected while a process imports, nor when it ends; tests/serve/test_start.py has whole processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CODE = """
import gc
from penstock.process.garbage_collection import pause_collection, resume_collection, spare_imports

class Cycle:
    def __init__(self, name):
        self.name, self.me = name, self

    def __del__(self):
        print(self.name)

"""


@pytest.mark.parametrize(
    ("steps", "collected"),
    [
        ("Cycle('start'); resume_collection(); print(gc.isenabled())", ["start", "True"]),
        ("Cycle('imports'); spare_imports(); Cycle('start'); resume_collection()", ["start"]),
        ("resume_collection(); Cycle('request'); gc.collect()", ["request"]),
        ("print(gc.isenabled()); Cycle('end')", ["False"]),
    ],
)
def test_only_garbage_made_after_the_imports_is_collected(steps: str, collected: list[str]) -> None:
    code = f"{_CODE}pause_collection()\n{steps}"
    printed = subprocess.run([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, check=True, text=True).stdout
    assert printed.split() == collected
