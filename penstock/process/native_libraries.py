"""Native libraries that panic: a panic is a BaseException, which would end the process. Here it becomes an exception.

The tokenizers library is used through `GuardedTokenizer` only. It is imported late: most processes need none. Calls
that are made for every token of a request have a `try` of their own around them, which costs nothing.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tokenizers import Encoding, Tokenizer

os.environ["RUST_BACKTRACE"] = "0"  # otherwise a panic writes its stack to stderr: 60 lines for a client's text

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
            if (reason := reason_of_panic(error)) is None:
                raise
            raise LibraryError(reason) from None

    return guarded_call


def reason_of_panic(error: BaseException) -> str | None:
    """Return why a library gave up, in one line; None for any other error."""
    # Each library has a PanicException of its own, which cannot be imported.
    if type(error) is Exception or type(error).__module__ == "pyo3_runtime":
        return " ".join(str(error).split())[:_MAX_REASON]
    return None


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


class GuardedTokenizer:
    """A tokenizer. Each method is the library's of that name, and raises LibraryError where that panics."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.no_truncation = guarded(tokenizer.no_truncation)
        self.no_padding = guarded(tokenizer.no_padding)
        self.encode_batch = guarded(tokenizer.encode_batch)
        self.encode_batch_fast = guarded(tokenizer.encode_batch_fast)
        self.post_process = guarded(tokenizer.post_process)
        self.num_special_tokens_to_add = guarded(tokenizer.num_special_tokens_to_add)
        self.decode = guarded(tokenizer.decode)
        self.decode_batch = guarded(tokenizer.decode_batch)
        self.get_vocab = guarded(tokenizer.get_vocab)
        self.get_added_tokens_decoder = guarded(tokenizer.get_added_tokens_decoder)
        self.id_to_token = guarded(tokenizer.id_to_token)
        self.token_to_id = guarded(tokenizer.token_to_id)
        self.decoder_types: frozenset[str] = guarded(_decoder_types)(tokenizer)

    @classmethod
    def from_file(cls, path: Path) -> GuardedTokenizer:
        """Raises LibraryError for what the library cannot read."""
        from tokenizers import Tokenizer

        return cls(guarded(Tokenizer.from_file)(str(path)))


def _decoder_types(tokenizer: Tokenizer) -> frozenset[str]:
    """Return the types of a tokenizer's decoder, and of its parts if it is a sequence."""
    if tokenizer.decoder is None:
        return frozenset()
    state: dict[str, Any] = msgspec.json.decode(tokenizer.decoder.__getstate__())
    return frozenset(part["type"] for part in (state, *state.get("decoders", ())))


def check_readable(tokenizer_json: bytes) -> None:
    """Raises LibraryError for what the library cannot read."""
    from tokenizers import Tokenizer

    guarded(Tokenizer.from_buffer)(tokenizer_json)


def truncate(encoding: Encoding, num_tokens: int, side: Literal["left", "right"]) -> None:
    guarded(encoding.truncate)(num_tokens, direction=side)


def begin_texts_with(tokenizer: Tokenizer, token: str) -> None:
    """Put the token before each text, if the vocabulary has it."""
    from tokenizers import processors

    token_id = tokenizer.token_to_id(token)
    if token_id is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, token_id)]
        )
