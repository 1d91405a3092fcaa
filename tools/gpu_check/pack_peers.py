"""Packs downloaded packages of other engines into one archive for `--peers`, after importing them.

`python3 -m penstock.tools.gpu_check.pack_peers --out peers.tar.xz flash_attn_3-3.0.0-….whl nano-vllm/`: wheels are
unpacked, and packages in directories are copied. From vLLM's wheel only FlashAttention 3 is taken, under the name that
it has in its own wheel. Unpack the archive on the GPU's machine and name its directory with `--peers`.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

_MAX_BYTES = 4 << 30
"""Limit of one wheel's unpacked size."""
_IMPORT_TIMEOUT_S = 120.0
VLLM_LIBRARY = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
_FUNCTIONS = Path(__file__).parent / "kernel_speed" / "flash_attn_3_of_vllm.py"
_EXPECTED = ("flash_attn_interface", "nanovllm")
"""Modules that the check looks for."""


class PeersRefused(Exception):
    """An input is neither a wheel nor a directory with a package, or cannot be unpacked; the message says which."""


def gather(sources: list[Path], directory: Path) -> None:
    """Unpack wheels, and copy packages, into the directory. Raises PeersRefused."""
    for source in sources:
        if source.suffix == ".whl" and source.is_file():
            with _opened(source) as archive:
                if VLLM_LIBRARY in archive.namelist():
                    _take_flash_attention_3(archive, directory)
                else:
                    archive.extractall(directory)  # noqa: S202 - names were checked
        elif source.is_dir():
            packages = [path.parent for path in sorted(source.glob("*/__init__.py"))]
            if not packages:
                raise PeersRefused(f"{source} has no package: no directory in it has an __init__.py")
            for package in packages:
                shutil.copytree(package, directory / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            raise PeersRefused(f"{source} is neither a wheel nor a directory")


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """Raises PeersRefused for a file that is not a wheel, or whose files are too large or would be unpacked
    elsewhere."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            outside = [name for name in names if name.startswith("/") or ".." in PurePosixPath(name).parts]
            num_bytes = sum(info.file_size for info in archive.infolist())
            if outside:
                raise PeersRefused(f"{wheel} has a file outside of itself: {outside[0]}")
            if num_bytes > _MAX_BYTES:
                raise PeersRefused(f"{wheel} has {num_bytes:,} bytes; the limit is {_MAX_BYTES:,}")
            yield archive
    except zipfile.BadZipFile as error:
        raise PeersRefused(f"{wheel} is not a wheel: {error}") from error


def _take_flash_attention_3(archive: zipfile.ZipFile, directory: Path) -> None:
    """Take the operator out of vLLM's wheel. Add functions over it, and the distribution that transformers asks for."""
    with archive.open(VLLM_LIBRARY) as library, (directory / PurePosixPath(VLLM_LIBRARY).name).open("wb") as file:
        shutil.copyfileobj(library, file)
    shutil.copyfile(_FUNCTIONS, directory / "flash_attn_interface.py")
    described = directory / "flash_attn_3-3.0.0.dist-info"
    described.mkdir(exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-3\nVersion: 3.0.0\n", encoding="utf-8")
    (described / "RECORD").write_text("flash_attn_interface.py,,\n", encoding="utf-8")


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
