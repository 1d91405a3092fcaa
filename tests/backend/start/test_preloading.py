"""What a backend does before its imports."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import sys, threading
from penstock.backend.start.preloading import prepare_imports
prepare_imports(sys.argv[1:])
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
print("libtorch_cpu.so" in open("/proc/self/maps").read(), "torch" in sys.modules)
import torch
print(torch.ones(3).sum().item())
"""


def run(*arguments: str) -> list[str]:
    child = subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=True)
    return child.stdout.splitlines()


def test_torch_finds_its_library_loaded() -> None:
    assert run() == ["True False", "3.0"]


def test_other_passes_load_what_they_need() -> None:
    assert run("--forward-pass", "fake") == ["False False", "3.0"]
