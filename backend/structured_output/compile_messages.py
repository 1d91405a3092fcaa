"""Messages between the backend and a compiling child, over `penstock.process.children`.

The backend sends one CompilerSetup and gets one CompilerReady, then sends one Grammar at a time and gets one
CompileReport for each.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from penstock.backend.structured_output.grammar_costs import MAX_ERROR_CHARACTERS
from penstock.shm.messages import MAX_GRAMMAR_CHARACTERS

MAX_MESSAGE_BYTES = 4 * MAX_GRAMMAR_CHARACTERS + 1024
"""A UTF-8 character has up to 4 bytes."""
_U63 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Error = Annotated[str, Meta(max_length=MAX_ERROR_CHARACTERS)]


class CompilerSetup(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tells a child which model it compiles for."""

    tokenizer_json: Annotated[str, Meta(max_length=4096)]
    vocab_size: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
    eos_token_ids: Annotated[tuple[int, ...], Meta(max_length=1024)]
    memory_bytes: _U63
    """Memory that one grammar may take."""


class CompilerReady(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """error explains why the tokenizer cannot be used; empty if it can."""

    error: _Error = ""


class CompileReport(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The grammar compiles, and its first mask can be filled; otherwise error explains why not."""

    error: _Error = ""
    num_bytes: _U63 = 0
    """Memory of the compiled grammar; 0 if it could not be measured."""
    relaxed: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARACTERS + 128)] = ""
    """Lark of what the child compiled instead: some keywords of lenient schemas did not compile."""
