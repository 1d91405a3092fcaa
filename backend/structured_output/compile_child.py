"""A process that compiles grammars, so that it can be killed if one takes too much time or memory.

The backend starts it (`compiler_process`) with a socket and the backend's process id as arguments. It imports no torch.
It ends when the socket closes, and the kernel kills it when the backend dies.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

from llguidance import LLTokenizer

from penstock.backend.structured_output.compile_grammar import compile_or_relax, load_tokenizer
from penstock.backend.structured_output.compile_messages import (
    MAX_MESSAGE_BYTES,
    CompileReport,
    CompilerReady,
    CompilerSetup,
)
from penstock.backend.structured_output.grammar_costs import BadGrammar, error_of, one_line
from penstock.process.risky_children import ChannelClosed, begin_child, limit, receive, send
from penstock.shm.messages import Grammar

_STACK_BYTES = 8 << 20
_libc = ctypes.CDLL(None)


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2. Other C libraries have none."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905
    )


def _allocated_bytes() -> int | None:
    """Bytes that malloc has given out; None if the C library cannot tell."""
    if not hasattr(_libc, "mallinfo2"):
        return None
    _libc.mallinfo2.restype = _MallocInfo
    info = _libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _limit_memory(num_bytes: int) -> None:
    """Let the process allocate num_bytes more than it has; beyond that Rust aborts it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    data_kib = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmData:")))
    limit(resource.RLIMIT_DATA, 1024 * data_kib + num_bytes)


def _compile(tokenizer: LLTokenizer, grammar: Grammar) -> CompileReport:
    before = _allocated_bytes()
    try:
        matcher, compiled = compile_or_relax(tokenizer, grammar)
    except BadGrammar as error:
        return CompileReport(str(error))
    matcher.compute_bitmask()
    if matcher.is_error():
        return CompileReport(error_of(matcher))
    after = _allocated_bytes()
    num_bytes = max(0, after - before) if before is not None and after is not None else 0
    return CompileReport("", num_bytes, "" if compiled is grammar else compiled.text)


def main(arguments: list[str]) -> None:
    channel = begin_child(arguments)
    limit(resource.RLIMIT_STACK, _STACK_BYTES)
    try:
        setup = receive(channel, CompilerSetup, MAX_MESSAGE_BYTES)
        try:
            tokenizer = load_tokenizer(Path(setup.tokenizer_json), setup.vocab_size, setup.eos_token_ids)
        except (OSError, ValueError) as error:
            send(channel, CompilerReady(one_line(f"{type(error).__name__}: {error}")))
            return
        send(channel, CompilerReady())
        # From now on the library's output may quote a client's grammar, which must not be logged.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        while True:
            grammar = receive(channel, Grammar, MAX_MESSAGE_BYTES)
            _limit_memory(setup.memory_bytes)
            send(channel, _compile(tokenizer, grammar))
    except ChannelClosed:
        return


if __name__ == "__main__":
    main(sys.argv[1:])
