"""A library that is measured in a process of its own Python environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from penstock.process.children import stop_with_parent
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.processes import pause_tree, resume_tree

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


@dataclass(frozen=True, slots=True)
class LibraryProcess:
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    name: str

    @property
    def pid(self) -> int:
        return self.process.pid

    def encode(self, texts: list[str]) -> float:
        """Return the seconds that the library took. Raises BenchError."""
        if self.process.stdin is None:
            raise BenchError(f"{self.name} has no input")
        try:
            self.process.stdin.write(msgspec.json.encode(texts) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise BenchError(f"{self.name} ended\n{self._tail()}") from None
        return msgspec.json.decode(self.read_line(), type=_Timed).seconds

    def read_line(self) -> bytes:
        """Raises BenchError."""
        line = self.process.stdout.readline() if self.process.stdout is not None else b""
        if not line:
            raise BenchError(f"{self.name} ended\n{self._tail()}")
        return line

    def _tail(self) -> str:
        text = os.pread(self.errors.fileno(), os.fstat(self.errors.fileno()).st_size, 0).decode(errors="replace")
        return "\n".join(text.splitlines()[-12:])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        resume_tree(self.pid)
        try:
            yield
        finally:
            pause_tree(self.pid)


@contextlib.contextmanager
def library_process(library: Library, model_dir: Path) -> Iterator[LibraryProcess]:
    """Load the model while the context lasts; the process is paused except in `running`. Raises BenchError."""
    argv = [library.python, str(_SCRIPT), library.library, str(model_dir), library.dtype]
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, preexec_fn=stop_with_parent
            )
        except OSError as error:
            raise BenchError(f"{library.python} cannot be started: {error.strerror}") from None
        with process:
            try:
                loading = LibraryProcess(process, errors, library.name)
                name = msgspec.json.decode(loading.read_line(), type=_Named).name
                pause_tree(process.pid)
                yield LibraryProcess(process, errors, name)
            finally:
                process.kill()
