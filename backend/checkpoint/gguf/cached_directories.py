"""Directories in the cache that are made from a model's files: each once for each state of the files.

A directory has another name until it is complete. The cache keeps the last used ones whose files exist.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.process.cache_directory import cache_directory, mark_used, remove_unused
from penstock.process.private_directory import Trust, check_directory


def cached_directory(kind: str, label: str, files: Sequence[Path], version: str, fill: Callable[[Path], None]) -> Path:
    """The directory for these files; fill writes a new one. Raises OSError, UnsafeDirectory.

    label is the readable part of its name. version changes when fill would write something else.
    """
    identity = hashlib.sha256(version.encode())
    for file in files:
        status = file.stat()
        identity.update(f"\0{file}\0{status.st_size} {status.st_mtime_ns}".encode())
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", label)[:64]
    directory = cache_directory() / kind / f"{readable}-{identity.hexdigest()[:12]}"
    if directory.is_dir():
        check_directory(directory, Trust.READABLE, create=False)
        mark_used(directory)
    else:
        check_directory(directory.parent, Trust.READABLE)
        _make(directory, fill)
        remove_unused(directory.parent)
    return directory


def _make(directory: Path, fill: Callable[[Path], None]) -> None:
    partial = directory.with_name(f"{directory.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700)
    try:
        fill(partial)
        try:
            partial.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process has just made it
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
