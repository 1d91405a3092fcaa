"""Recognises packed weights: by the checkpoint's files, the options, the kernels and the code that packs."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backend.checkpoint.fingerprint import weights_fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable

_BACKEND = Path(__file__).parents[3]
_CODE_ROOTS = (_BACKEND / "checkpoint", _BACKEND / "passes" / "decoder")
_CODE_SUFFIXES = ("py", "h", "cpp", "cu", "cuh")


def packing_fingerprint(model_dir: Path, settings: Iterable[object]) -> str:
    """A text that differs if other weights would be packed, or packed in another way.

    It is the same on another disk or machine with the same files.
    """
    # sentence-transformers has weights in directories of modules, too.
    modules = sorted(path for path in model_dir.iterdir() if path.is_dir())
    files = [weights_fingerprint(directory) for directory in (model_dir, *modules)]
    return hashlib.sha256(repr((tuple(map(str, settings)), code_hash(), files)).encode()).hexdigest()


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
