"""Compiles the stub of the CUDA driver, once a process."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")


@cache
def stub_library() -> str:
    """Return the library's path; its folder goes with the process."""
    assert COMPILER is not None
    directory = Path(tempfile.mkdtemp(prefix="penstock-stub-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = directory / "libcuda-stub.so"
    source = Path(__file__).with_name("stub_cuda.c")
    subprocess.run([COMPILER, "-x", "c", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    return str(path)
