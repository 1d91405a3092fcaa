"""Compiles the stub of the CUDA driver, once a test run."""

from __future__ import annotations

import os
import shutil
import subprocess
import zlib
from functools import cache
from pathlib import Path

from tests.temporary import shared_file

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")


@cache
def stub_library() -> str:
    """Return the library's path."""
    source = Path(__file__).with_name("stub_cuda.c")
    path = shared_file(f"libcuda-stub-{zlib.crc32(source.read_bytes()):08x}.so")
    if not path.exists():
        assert COMPILER is not None
        draft = path.with_suffix(f".{os.getpid()}")
        subprocess.run([COMPILER, "-x", "c", "-shared", "-fPIC", str(source), "-o", str(draft)], check=True)
        draft.rename(path)
    return str(path)
