"""The directory of files that can be regenerated: compiled kernels, quantised weights."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from penstock.shm.process.private_directory import UnsafeDirectory

CUBINS_VARIABLE = "PENSTOCK_CUBINS"
"""Environment variable: a directory of compiled GPU kernels that were made elsewhere."""


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/penstock, by default ~/.cache/penstock. Raises UnsafeDirectory for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "penstock"
    try:
        return Path.home() / ".cache" / "penstock"
    except RuntimeError as error:
        raise UnsafeDirectory("this user has no home directory") from error


def check_kept_file(path: Path) -> None:
    """Raises UnsafeDirectory if others could change the file; OSError if it is missing. Its directory is checked."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise UnsafeDirectory(f"{path} is not a file, can be written by others or belongs to another user")
