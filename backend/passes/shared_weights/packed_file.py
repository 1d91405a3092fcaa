"""Packed weights in a file of the cache directory, which later starts, replicas and upgrades map.

Each checkpoint has a directory for each way to pack it: `packed` is the file, under another name until it is complete.
Whoever finds it maps the pages of the page cache, so the weights are in memory once, however many processes use them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from penstock.backend.checkpoint.files.layout import GGUF_SUFFIX
from penstock.backend.checkpoint.fingerprint import WEIGHTS_SUFFIXES
from penstock.process.cache_directory import (
    cache_directory,
    check_cached_file,
    mark_used,
    num_bytes_on_disk,
    remove_unused,
)
from penstock.process.options import format_size
from penstock.process.private_directory import Trust, UnsafeDirectory, check_directory

logger = logging.getLogger("penstock.backend")

_PARTIAL = "partial."


class PackedFile:
    """Implements `blocks.WeightStore`. Processes of one user share it."""

    def __init__(self, directory: Path, source: Path, num_bytes: int) -> None:
        """source is the checkpoint: without it the file is of no use. num_bytes is about the size of the weights.

        Raises OSError, and UnsafeDirectory if others can write the directory.
        """
        check_directory(directory, Trust.READABLE)
        self._directory = directory
        self._path = directory / "packed"
        self._source = source
        self._num_bytes = num_bytes

    @classmethod
    def of(cls, model_dir: Path, settings: Iterable[object], num_bytes: int) -> PackedFile:
        """The file of a checkpoint that is packed with these settings."""
        weights = sorted(path for path in model_dir.iterdir() if path.suffix in WEIGHTS_SUFFIXES)
        # A GGUF file has a new directory after each change; the link in it leads to the same place.
        source = weights[0].resolve() if weights and weights[0].suffix == GGUF_SUFFIX else model_dir.resolve()
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", source.name)[:64]
        place = hashlib.sha256(repr((str(source), tuple(map(str, settings)))).encode()).hexdigest()[:12]
        return cls(cache_directory() / "weights" / f"{readable}-{place}", source, num_bytes)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for another process that packs the same weights; its death ends the lock."""
        with contextlib.ExitStack() as closer:
            # Without a lock each process packs for itself, and the last file stays. A read-only directory gets none.
            with contextlib.suppress(OSError):
                fd = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                closer.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield

    def find(self) -> tuple[int, ...]:
        """A new fd of the file, which the caller closes; empty if there is none, or one that others could change."""
        try:
            check_cached_file(self._path)
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return ()
        except (OSError, UnsafeDirectory) as error:
            logger.warning("packed weights are not used: %s", error)
            return ()
        with contextlib.suppress(OSError):  # read-only
            mark_used(self._directory)
        return (fd,)

    def create(self) -> int:
        """An fd of an empty file; `leave` gives it its name. The caller closes it. Raises OSError."""
        self._make_room()
        link = self._directory / "source"
        link.unlink(missing_ok=True)
        link.symlink_to(self._source)
        return tempfile.mkstemp(dir=self._directory, prefix=_PARTIAL)[0]

    def leave(self, fds: Sequence[int]) -> None:
        """Others find the file from now on. Raises OSError."""
        os.fdatasync(fds[0])  # else it might be there after a power failure, and its content not
        partial = next(path for path in self._partial() if os.path.samestat(path.stat(), os.fstat(fds[0])))
        partial.rename(self._path)
        logger.info("the packed weights are kept in %s", self._path)

    def clear(self) -> None:
        """Remove the file, and what is left of others. Processes that have mapped it keep its pages."""
        for path in (self._path, *self._partial()):
            with contextlib.suppress(OSError):  # in a read-only directory no other file takes its place either
                path.unlink()

    def holds(self, fd: int) -> bool:
        """Whether fd is the file that others find."""
        with contextlib.suppress(OSError):
            return os.path.samestat(self._path.stat(), os.fstat(fd))
        return False

    @property
    def is_empty(self) -> bool:
        return not self._path.exists()

    def duplicate(self) -> PackedFile:
        return PackedFile(self._directory, self._source, self._num_bytes)

    def close(self) -> None:
        """Nothing is open."""

    def _partial(self) -> list[Path]:
        return list(self._directory.glob(f"{_PARTIAL}*"))

    def _make_room(self) -> None:
        """Remove files of other weights until all together take at most half of the space that is free or theirs.
        Raises OSError if this file alone would take more."""
        parent = self._directory.parent
        most_bytes = (shutil.disk_usage(parent).free + num_bytes_on_disk(parent)) // 2
        if self._num_bytes > most_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{format_size(self._num_bytes)} are needed, and packed weights may take {format_size(most_bytes)}, "
                "half of the space that is free on the disk",
            )
        mark_used(self._directory)
        remove_unused(parent, most_bytes - self._num_bytes)
