"""Keeps compiled kernels as files, so that only the first start with a version of the sources compiles.

A cubin is one source with its macros, for one architecture. Its file is named for a digest of sources, macros, options
and architecture, so a file that exists is current. The compiler's version is not part of it, so that files made
elsewhere are found: after an update of NVRTC empty the directory to compile again. Files are looked for in
$PENSTOCK_CUBINS first, which the user names and trusts, and then in the cache directory, which is checked.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from penstock.backend.passes.cuda.device import nvrtc
from penstock.backend.passes.cuda.device.launcher import KERNELS_DIR, Kernel
from penstock.process.cache_directory import CUBINS_VARIABLE, cache_directory, check_cached_file
from penstock.process.private_directory import Trust, UnsafeDirectory, check_directory

logger = logging.getLogger("penstock.backend")


class CubinCache:
    """The compiled kernels of one architecture. Any thread may use it."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        brought = os.environ.get(CUBINS_VARIABLE)
        self._brought = Path(brought) if brought else None
        self.num_compiled = 0
        """Modules that were found nowhere."""

    @contextmanager
    def opened(self, kernels: Sequence[Kernel]) -> Iterator[Path]:
        """The file with kernels of one source with the same macros, for as long as it takes to load it.

        Compiles it if it is nowhere. Raises KernelFailed, and OSError if no file can be written at all.
        """
        name = cubin_name(kernels, self.arch)
        if self._brought is not None and (self._brought / name).is_file():
            yield self._brought / name
            return
        try:
            path = self._kept(name, kernels)
        except (OSError, UnsafeDirectory) as error:
            _warn_not_kept(str(error))
            with tempfile.TemporaryDirectory(prefix="penstock-kernels-") as directory:
                path = Path(directory, name)
                path.write_bytes(self._compile(kernels))
                yield path
            return
        yield path

    def _kept(self, name: str, kernels: Sequence[Kernel]) -> Path:
        directory = cache_directory() / "cubins"
        check_directory(directory, Trust.READABLE)
        path = directory / name
        if not path.exists():
            write_cubin(path, self._compile(kernels))
        check_cached_file(path)
        return path

    def _compile(self, kernels: Sequence[Kernel]) -> bytes:
        self.num_compiled += 1
        return nvrtc.compile_module(kernels, self.arch)


def write_cubin(path: Path, cubin: bytes) -> None:
    """Write the file as a whole: other processes may write the same one at the same time. Raises OSError."""
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(cubin)
        os.rename(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def cubin_name(kernels: Sequence[Kernel], arch: str) -> str:
    """The file name of kernels of one source with the same macros."""
    source = kernels[0].source
    digest = hashlib.blake2b(_sources(source), digest_size=12)
    digest.update(repr((nvrtc.OPTIONS, kernels[0].macros, arch)).encode())
    return f"{Path(source).stem}-{arch}-{digest.hexdigest()}.cubin"


@cache
def _sources(source: str) -> bytes:
    """A digest of the source and of all files that it may include."""
    digest = hashlib.blake2b()
    for path in (KERNELS_DIR / source, *sorted(KERNELS_DIR.rglob("*.cuh"))):
        digest.update(b"\0".join((path.name.encode(), path.read_bytes(), b"")))
    return digest.digest()


@cache
def _warn_not_kept(reason: str) -> None:
    logger.warning(
        "The compiled GPU kernels cannot be kept (%s), so every start compiles them again: set XDG_CACHE_HOME to a "
        "directory that only this user can write",
        reason,
    )
