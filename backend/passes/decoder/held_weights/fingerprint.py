"""Recognises packed weights: by the checkpoint's files, the options, the kernels and the code that packs."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MAX_FILES = 10_000
_BACKEND = Path(__file__).parents[4]


def packing_fingerprint(model_dir: Path, settings: Iterable[object]) -> str:
    """Differs if other weights would be packed, or in another way.

    Of a file its place, size, inode and times count, not its content: so this takes milliseconds.
    """
    digest = hashlib.sha256(repr((tuple(map(str, settings)), code_hash())).encode())
    for path in _files(model_dir):
        found = path.stat()
        times = found.st_mtime_ns, found.st_ctime_ns
        digest.update(repr((str(path.resolve()), found.st_dev, found.st_ino, found.st_size, *times)).encode())
    return digest.hexdigest()


def _files(directory: Path) -> Iterator[Path]:
    """Files of the checkpoint, and those in its directories, as sentence-transformers has them."""
    found = sorted(path for pattern in ("*", "*/*") for path in directory.glob(pattern) if path.is_file())
    yield from found[:_MAX_FILES]


@cache
def code_hash() -> str:
    """A hash of the modules and kernels that read and pack weights."""
    digest = hashlib.sha256()
    for root in (_BACKEND / "checkpoint", _BACKEND / "passes" / "decoder"):
        for path in sorted(path for suffix in ("py", "h", "cpp") for path in root.rglob(f"*.{suffix}")):
            digest.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
