"""Bounds the directories made from GGUF files: the cache keeps the last used ones whose files exist."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MAX_KEPT = 16


def mark_used(directory: Path) -> None:
    """Raises OSError."""
    os.utime(directory)


def remove_unused(parent: Path) -> None:
    """Remove directories whose links lead nowhere, and all but the MAX_KEPT latest ones.

    Another process may do the same at the same time.
    """
    used: list[tuple[int, Path]] = []
    for directory in parent.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if directory.is_dir() and not directory.is_symlink():
                used.append((directory.stat().st_mtime_ns, directory))
    for place, (_, directory) in enumerate(sorted(used, reverse=True)):
        is_broken = any(link.is_symlink() and not link.exists() for link in directory.glob("*.gguf"))
        if is_broken or place >= MAX_KEPT:
            shutil.rmtree(directory, ignore_errors=True)
