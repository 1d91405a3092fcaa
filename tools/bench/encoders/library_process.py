"""A library that is measured in a process of its own Python environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.server_process import ServerProcess

_SCRIPT = Path(__file__).parent / "library_peer.py"
_LIBRARIES = ("sentence-transformers", "onnxruntime", "penstock")


class _Named(Struct):
    name: str


class _Timed(Struct):
    seconds: float


@dataclass(frozen=True, slots=True)
class Library:
    """A value of --library: LIBRARY,DTYPE=PYTHON."""

    library: str
    dtype: str
    python: str

    @classmethod
    def parse(cls, text: str) -> Library:
        """Raises BenchError."""
        name, _, python = text.partition("=")
        library, _, dtype = name.partition(",")
        if library not in _LIBRARIES or dtype not in ("fp32", "bf16") or not python:
            raise BenchError(
                f'--library "{text}" is not LIBRARY,DTYPE=PYTHON, with one of {", ".join(_LIBRARIES)}, fp32 or bf16, '
                "and the interpreter that has the library"
            )
        return cls(library, dtype, python)

    @property
    def name(self) -> str:
        return f"{self.library} {self.dtype}"


class LibraryProcess(ServerProcess):
    def encode(self, texts: list[str]) -> float:
        """Return the seconds that the library took. Raises BenchError."""
        return msgspec.json.decode(self.ask(msgspec.json.encode(texts)), type=_Timed).seconds


@contextlib.contextmanager
def library_process(library: Library, model_dir: Path) -> Iterator[LibraryProcess]:
    """Load the model while the context lasts; the process is paused except in `running`. Raises BenchError."""
    argv = [library.python, str(_SCRIPT), library.library, str(model_dir), library.dtype]
    with LibraryProcess.run(library.name, argv, os.environ, answers=True) as process:
        process.name = msgspec.json.decode(process.read_line(), type=_Named).name
        with process.paused():
            yield process
