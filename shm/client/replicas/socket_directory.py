"""A directory whose sockets are the backends of one model."""

from __future__ import annotations

import logging
import os
import stat
from hashlib import blake2b
from pathlib import Path

from penstock.shm.link.listening_address import MAX_NAME_BYTES, MAX_PATH_BYTES, NEXT
from penstock.shm.memory.prefix_table import MAX_REPLICAS

logger = logging.getLogger("penstock.client")

SUFFIX = ".sock"
FIRST_NAME = f"backend{SUFFIX}"
"""The socket to wait for while the directory has none."""


class SocketDirectory:
    """Reads the directory again and again. An entry that cannot be used is logged once, as long as it stays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._paths: list[Path] = []
        self._complaints: set[str] = set()

    def look(self) -> list[Path]:
        """Return the sockets in order of their names; the previous ones if the directory cannot be read now."""
        complaints: set[str] = set()
        try:
            with os.scandir(self.path) as entries:
                names = sorted(entry.name for entry in entries if self._is_backend(entry, complaints))
        except OSError as error:
            complaints.add(f"cannot read the directory of backends {self.path}: {error.strerror}; the backends stay")
        else:
            if len(names) > MAX_REPLICAS:
                complaints.add(f"{self.path} has {len(names)} sockets; the first {MAX_REPLICAS} are used")
            self._paths = [self.path / name for name in names[:MAX_REPLICAS]]
        for complaint in sorted(complaints - self._complaints):
            logger.warning("%s", complaint)
        self._complaints = complaints
        return self._paths

    def _is_backend(self, entry: os.DirEntry[str], complaints: set[str]) -> bool:
        if not entry.name.endswith(SUFFIX) or entry.name.startswith(".") or entry.name.endswith(NEXT + SUFFIX):
            return False
        try:
            is_socket = stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
        except FileNotFoundError:  # it has just gone
            return False
        if not is_socket:
            complaints.add(f"{entry.path} is ignored: it is no socket")
            return False
        for what, text, limit in (("path", entry.path, MAX_PATH_BYTES), ("name", entry.name, MAX_NAME_BYTES)):
            if (num_bytes := len(os.fsencode(text))) > limit:
                complaints.add(f"{entry.path} is ignored: its {what} has {num_bytes} bytes; the limit is {limit}")
                return False
        return True


def name_of(path: Path) -> str:
    """The name of a replica in logs and metrics."""
    return path.name.removesuffix(SUFFIX).encode("utf-8", "replace").decode()


def index_of(path: Path) -> int:
    """The replica's number in the table of prefixes: the same in all workers, whatever else is in the directory.

    Two backends may share a number. Then only their process ids tell them apart in the table, and a wrong hint is the
    worst result.
    """
    return int.from_bytes(blake2b(os.fsencode(path.name), digest_size=4).digest()) % MAX_REPLICAS
