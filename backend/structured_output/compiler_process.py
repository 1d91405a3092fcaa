"""The backend's side of one compiling child: start it, hand it a grammar, kill it over a limit."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from penstock.backend.structured_output.compile_messages import (
    MAX_MESSAGE_BYTES,
    CompileReport,
    CompilerReady,
    CompilerSetup,
)
from penstock.backend.structured_output.grammar_costs import BadGrammar
from penstock.process.risky_children import ChannelClosed, receive, send, start_child
from penstock.process.supervisor import describe_end
from penstock.shm.messages import Grammar

_START_TIMEOUT_S = 120.0
"""Time to import llguidance and read the tokenizer. A large tokenizer takes 2 s on an idle machine."""
_CRASHES = frozenset({-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL})
"""Exit statuses that the grammar causes: out of memory (Rust aborts), out of stack, a bug in the library."""
Message = TypeVar("Message", bound=Struct)


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits of one grammar. The backend compiles it again after a child has compiled it within these limits."""

    timeout_s: float = 5.0
    memory_bytes: int = 256 << 20
    compiled_bytes: int = 16 << 20
    """Memory of the compiled grammar, which the backend keeps."""


class TokenizerUnusable(Exception):
    """llguidance cannot use the model's tokenizer."""


class CompilerDied(Exception):
    """The child ended for a reason that is not the grammar's fault."""


class CompilerProcess:
    """One child. It belongs to the thread that made it: the kernel kills the child when that thread ends. Only `kill`
    may be called from other threads."""

    def __init__(
        self, tokenizer_json: Path, vocab_size: int, eos_token_ids: tuple[int, ...], limits: CompileLimits
    ) -> None:
        """Start it and wait until it has read the tokenizer. Raises TokenizerUnusable, CompilerDied."""
        self._limits = limits
        try:
            self._process, self._channel = start_child("penstock.backend.structured_output.compile_child")
        except OSError as error:
            raise CompilerDied(f"could not start: {error}") from None
        setup = CompilerSetup(str(tokenizer_json), vocab_size, eos_token_ids, limits.memory_bytes)
        try:
            ready = self._exchange(setup, CompilerReady, _START_TIMEOUT_S)
        except TimeoutError:
            self.close()
            raise CompilerDied(f"did not start within {_START_TIMEOUT_S:g} s") from None
        except ChannelClosed:
            raise CompilerDied(self._end()) from None
        if ready.error:
            self.close()
            raise TokenizerUnusable(ready.error)

    @property
    def pid(self) -> int:
        return self._process.pid

    def compile(self, grammar: Grammar) -> CompileReport:
        """Raises BadGrammar, CompilerDied. After CompilerDied, or if `is_alive` is False, make a new one."""
        try:
            report = self._exchange(grammar, CompileReport, self._limits.timeout_s)
        except TimeoutError:
            self.close()
            raise BadGrammar(f"compiling it takes longer than the limit of {self._limits.timeout_s:g} s") from None
        except ChannelClosed:
            end = self._end()
            if self._process.returncode in _CRASHES:
                raise BadGrammar(
                    f"compiling it takes more memory than the limit of {self._limits.memory_bytes >> 20} MiB, or a "
                    "deeper stack than the compiler's 8 MiB"
                ) from None
            raise CompilerDied(end) from None
        if report.error:
            raise BadGrammar(report.error)
        if report.num_bytes > self._limits.compiled_bytes:
            raise BadGrammar(
                f"compiled it takes {report.num_bytes >> 20} MiB of memory; "
                f"the limit is {self._limits.compiled_bytes >> 20} MiB"
            )
        return report

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Safe from any thread: a `compile` in another thread raises CompilerDied."""
        self._process.kill()

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def _exchange(self, message: Struct, kind: type[Message], timeout_s: float) -> Message:
        self._channel.settimeout(timeout_s)
        send(self._channel, message)
        return receive(self._channel, kind, MAX_MESSAGE_BYTES)

    def _end(self) -> str:
        """Return how the child ended. A child that sent an invalid message and still runs is killed."""
        self._channel.close()
        try:
            returncode = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.close()
            returncode = self._process.returncode
        return describe_end(returncode)
