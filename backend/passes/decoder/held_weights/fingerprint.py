"""Recognises packed weights: by the checkpoint's files, the options, the kernels and the code that packs."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MAX_FILES = 10_000
_BACKEND = Path(__file__).parents[3]
_CODE_ROOTS = (_BACKEND / "checkpoint", _BACKEND / "passes" / "decoder")
_CODE_SUFFIXES = ("py", "h", "cpp", "cu", "cuh")


def packing_fingerprint(model_dir: Path, settings: Iterable[object]) -> str:
    """A text that differs if other weights would be packed, or packed in another way.

    For files, place, size, inode and times count, not content: so this takes milliseconds.
    """
    digest = hashlib.sha256(repr((tuple(map(str, settings)), code_hash())).encode())
    for path in _files(model_dir):
        found = path.stat()
        times = found.st_mtime_ns, found.st_ctime_ns
        digest.update(repr((str(path.resolve()), found.st_dev, found.st_ino, found.st_size, *times)).encode())
    return digest.hexdigest()


def _files(directory: Path) -> Iterator[Path]:
    """Files of the checkpoint, and of its directories, as sentence-transformers has them."""
    found = sorted(path for pattern in ("*", "*/*") for path in directory.glob(pattern) if path.is_file())
    yield from found[:_MAX_FILES]


@cache
def code_hash() -> str:
    """A hash of the modules and kernels that read and pack weights, as they are at the first call."""
    return hash_code(_CODE_ROOTS)


def hash_code(roots: Iterable[Path]) -> str:
    """Raises RuntimeError if a root has no code: a hash of nothing would recognise any weights."""
    digest = hashlib.sha256()
    for root in roots:
        paths = sorted(path for suffix in _CODE_SUFFIXES for path in root.rglob(f"*.{suffix}"))
        if not paths:
            raise RuntimeError(f"{root} has no code; this is a bug")
        for path in paths:
            digest.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
