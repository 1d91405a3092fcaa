"""A child process that holds a model: it answers each line on its standard input with a line of JSON."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from penstock.process.supervisor import module_argv
from penstock.tools.bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

_Answer = TypeVar("_Answer")


class JobChild:
    """The process, within a `with` block."""

    def __init__(self, module: str, arguments: Sequence[str], failure: str) -> None:
        """Return once the child has printed "loaded".

        Raises BenchError with the text failure, here and later; the child prints the reason on standard error.
        """
        self._failure = failure
        self._process = subprocess.Popen(module_argv(module, arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._read_line() != b"loaded\n":
            raise BenchError(failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, line: bytes, kind: type[_Answer]) -> _Answer:
        """Send a line without its end, and return the answer. Raises BenchError."""
        if self._process.stdin is not None:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        try:
            return msgspec.json.decode(self._read_line(), type=kind)
        except msgspec.MsgspecError:
            raise BenchError(self._failure) from None

    def _read_line(self) -> bytes:
        return self._process.stdout.readline() if self._process.stdout is not None else b""
