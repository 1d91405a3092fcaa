"""The directory of files that can be regenerated: compiled kernels, quantised and packed weights, GGUF models."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from penstock.process.private_directory import UnsafeDirectory

CUBINS_VARIABLE = "PENSTOCK_CUBINS"
"""Environment variable: a directory of compiled GPU kernels that were made elsewhere."""

MAX_KEPT = 16
"""Directories of one kind that `remove_unused` leaves."""


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/penstock, by default ~/.cache/penstock. Raises UnsafeDirectory for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "penstock"
    try:
        return Path.home() / ".cache" / "penstock"
    except RuntimeError as error:
        raise UnsafeDirectory("this user has no home directory") from error


def check_cached_file(path: Path) -> None:
    """Raises UnsafeDirectory if others could change the file; OSError if it is missing. Its directory is checked."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise UnsafeDirectory(f"{path} is not a file, can be written by others or belongs to another user")


def mark_used(directory: Path) -> None:
    """Raises OSError."""
    os.utime(directory)


def remove_unused(parent: Path, most_bytes: int | None = None) -> None:
    """Remove directories whose links all lead nowhere, and all but the last used ones: MAX_KEPT, with at most
    most_bytes together.

    Another process may do the same at the same time.
    """
    used: list[tuple[int, Path]] = []
    for directory in parent.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if directory.is_dir() and not directory.is_symlink():
                used.append((directory.stat().st_mtime_ns, directory))
    total_bytes = num_kept = 0
    for _, directory in sorted(used, reverse=True):
        num_bytes = num_bytes_on_disk(directory)
        links = [path for path in directory.glob("*") if path.is_symlink()]
        is_broken = bool(links) and not any(link.exists() for link in links)
        is_over = num_kept == MAX_KEPT or (most_bytes is not None and total_bytes + num_bytes > most_bytes)
        if is_broken or is_over:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            num_kept += 1
            total_bytes += num_bytes


def num_bytes_on_disk(directory: Path) -> int:
    """Size of all files in a directory and below."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            total += path.lstat().st_blocks * 512
    return total
