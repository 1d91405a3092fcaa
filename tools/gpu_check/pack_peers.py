"""Pack what the user has downloaded of other engines into one archive for `--peers`, after importing it.

`python3 -m penstock.tools.gpu_check.pack_peers --out peers.tar.xz flash_attn_3-3.0.0-….whl nano-vllm/`: wheels are
unpacked, of directories the packages in them are taken. Unpack the archive on the GPU's machine and name its directory
with `--peers`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

_MAX_BYTES = 2 << 30
"""Of one wheel, unpacked."""
_IMPORT_TIMEOUT_S = 120.0
_EXPECTED = ("flash_attn_interface", "nanovllm")
"""Modules that the check looks for."""


class PeersRefused(Exception):
    """An input is neither a wheel nor a directory with a package, or cannot be unpacked; the message says which."""


def gather(sources: list[Path], directory: Path) -> None:
    """Unpack wheels, and copy packages, into the directory. Raises PeersRefused."""
    for source in sources:
        if source.suffix == ".whl" and source.is_file():
            _unpack(source, directory)
        elif source.is_dir():
            packages = [path.parent for path in sorted(source.glob("*/__init__.py"))]
            if not packages:
                raise PeersRefused(f"{source} has no package: no directory in it has an __init__.py")
            for package in packages:
                shutil.copytree(package, directory / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            raise PeersRefused(f"{source} is neither a wheel nor a directory")


def _unpack(wheel: Path, directory: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            outside = [name for name in names if name.startswith("/") or ".." in PurePosixPath(name).parts]
            num_bytes = sum(info.file_size for info in archive.infolist())
            if outside:
                raise PeersRefused(f"{wheel} has a file outside of itself: {outside[0]}")
            if num_bytes > _MAX_BYTES:
                raise PeersRefused(f"{wheel} has {num_bytes:,} bytes; the limit is {_MAX_BYTES:,}")
            archive.extractall(directory)  # noqa: S202 - names were checked
    except zipfile.BadZipFile as error:
        raise PeersRefused(f"{wheel} is not a wheel: {error}") from error


def try_imports(directory: Path) -> dict[str, str]:
    """Import each expected module that is there, in a process of its own. Return the last line of each failure."""
    failed = {}
    for name in _EXPECTED:
        if not (directory / name).is_dir() and not (directory / f"{name}.py").is_file():
            continue
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            capture_output=True, text=True, check=False, timeout=_IMPORT_TIMEOUT_S,
            env=os.environ | {"PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        if done.returncode:
            failed[name] = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return failed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("pack_peers", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("peers.tar.xz"), help="the archive to write")
    parser.add_argument("sources", type=Path, nargs="+", help="wheels, and directories with packages")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place, "peers")
        directory.mkdir()
        try:
            gather(options.sources, directory)
        except (PeersRefused, OSError) as error:
            parser.error(str(error))
        failed = try_imports(directory)
        with tarfile.open(options.out, "w:xz") as archive:
            archive.add(directory, arcname="peers")
    print(f"{options.out}: {options.out.stat().st_size / (1 << 20):.1f} MiB")
    for name, reason in failed.items():
        # Machine code for a GPU does not load beside a torch for the CPU; the archive may still be good.
        print(f"{name} cannot be imported here: {reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
