"""A panic of a library in Rust is a BaseException, which would end the process. Here it becomes an exception."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MAX_REASON = 300


class LibraryError(ValueError):
    """A library gave up on a file or a text: it panicked, or raised Exception itself. The message is one line."""


def guarded(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the call with LibraryError for a panic."""

    def guarded_call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            # Each library has a PanicException of its own, which cannot be imported.
            if type(error) is Exception or type(error).__module__ == "pyo3_runtime":
                raise LibraryError(" ".join(str(error).split())[:_MAX_REASON]) from None
            raise

    return guarded_call


@contextlib.contextmanager
def panics_unseen() -> Iterator[None]:
    """Drop what is written to stderr meanwhile: a panic writes lines there. For a process without other threads."""
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(null)
        os.close(stderr)
