"""Recognises a checkpoint without reading all of its files, and what is made of it: packed weights, cached pages.

The latter depend on the options, the kernels and the code that packs, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from penstock.backend.checkpoint.files.layout import CONFIG_FILE, INDEX_FILE
from penstock.backend.checkpoint.formats.quant_method import OWN_FILE

WEIGHTS_SUFFIXES = (".safetensors", ".gguf")
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 256
_BACKEND = Path(__file__).parents[1]
_CODE_ROOTS = (_BACKEND / "checkpoint", _BACKEND / "passes" / "decoder")
_CODE_SUFFIXES = ("py", "h", "cpp", "cu", "cuh")


class FilesHash:
    """A hash of files: their names, sizes and content.

    Small files are hashed whole. For a weight file 256 samples of 4 KiB are hashed; the first sample holds the names
    and shapes. So a model of any size takes milliseconds.
    """

    def __init__(self, settings: str) -> None:
        self._digest = hashlib.sha256(settings.encode())

    def add(self, path: Path) -> None:
        num_bytes = path.stat().st_size
        self._digest.update(f"\0{path.name} {num_bytes}\0".encode())
        with path.open("rb") as file:
            if path.suffix not in WEIGHTS_SUFFIXES:
                self._digest.update(file.read())
                return
            for sample in range(_NUM_SAMPLES):
                file.seek(max(0, num_bytes - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
                self._digest.update(file.read(_SAMPLE_BYTES))

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def weights_fingerprint(model_dir: Path) -> str:
    """A hash that differs if the weights differ.

    The write times of the weight files count too: a small change might be between the samples.
    """
    files = [path for path in sorted(model_dir.iterdir()) if path.suffix in WEIGHTS_SUFFIXES and path.is_file()]
    found = FilesHash(" ".join(str(path.stat().st_mtime_ns) for path in files))
    for path in files:
        found.add(path)
    for name in (CONFIG_FILE, INDEX_FILE, OWN_FILE):
        if (model_dir / name).is_file():
            found.add(model_dir / name)
    return found.hexdigest()[:32]


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
