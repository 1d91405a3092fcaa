"""What constraints leave of a vocabulary, told from their definition; and grammars that cost nothing to compile.

A grammar's text is "SEED LENGTH": what may follow is drawn from the seed and the token before, and after LENGTH tokens
it meets a limit. "bad" does not compile, and at "broken" the compiler itself breaks down.
"""

from __future__ import annotations

import ctypes
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.backend.structured_output.grammar_compiler import BadGrammar, GrammarCompiler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.shm.messages import Constraints, Grammar

UNSOUND = ("bad", "broken")


def _follows(text: str, history: Sequence[int], vocab_size: int) -> set[int] | None:
    """What the grammar allows after history; None where it has met its limit."""
    seed, length = map(int, text.split())
    if len(history) >= length:
        return None
    before = history[-1] if history else vocab_size
    return {token for token in range(vocab_size) if (token * 7 + before * 5 + seed) % 3} or {0}


@dataclass
class Rules:
    """The oracle of `penstock.backend.structured_output.constraints`: no state, all is told from the tokens so far."""

    wanted: Constraints
    stop_ids: frozenset[int]
    vocab_size: int

    def allowed(self, generated: list[int]) -> set[int] | None:
        """What may come after these; None where nothing may, and the request fails."""
        wanted = self.wanted
        place = len(generated) - wanted.thinking_budget_tokens
        is_due = wanted.thinking_budget_tokens and 0 <= place < len(wanted.thinking_end)
        if is_due and _end_of(wanted.thinking_end, generated) is None:
            return {wanted.thinking_end[place]}
        left = set(wanted.allowed_token_ids or range(self.vocab_size))
        begun = _end_of(wanted.grammar_after, generated) if wanted.grammar_after else 0
        if wanted.grammar is not None and begun is not None:
            following = _follows(wanted.grammar.text, generated[begun:], self.vocab_size)
            left &= following or set()
            if not left:
                return None
        if len(generated) < wanted.min_tokens or begun is None:
            left = left - self.stop_ids or left
        ends = {run[-1] for run in wanted.bad_words if generated[len(generated) - len(run) + 1 :] == list(run[:-1])}
        return left - ends or left


def _end_of(run: tuple[int, ...], tokens: list[int]) -> int | None:
    """Where the first occurrence of the run ends."""
    ends = range(len(run), len(tokens) + 1)
    return next((end for end in ends if tuple(tokens[end - len(run) : end]) == run), None)


class SimulatedMatcher:
    """Stands where LLMatcher stands."""

    def __init__(self, text: str, vocab_size: int, history: tuple[int, ...] = ()) -> None:
        self._text = text
        self._vocab_size = vocab_size
        self._history = list(history)
        self._error = ""

    def deep_copy(self) -> SimulatedMatcher:
        return SimulatedMatcher(self._text, self._vocab_size, tuple(self._history))

    def consume_token(self, token: int) -> bool:
        if token not in (_follows(self._text, self._history, self._vocab_size) or ()):
            self._error = f"{token} after {self._history}"
            return False
        self._history.append(token)
        return True

    def rollback(self, num_tokens: int) -> bool:
        if not 0 <= num_tokens <= len(self._history):
            self._error = f"{num_tokens} of {len(self._history)} tokens taken back"
            return False
        del self._history[len(self._history) - num_tokens :]
        return True

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        following = _follows(self._text, self._history, self._vocab_size)
        if following is None:
            self._error = "a limit is met"
            return
        bits = sum(1 << token for token in following)
        ctypes.memmove(pointer, bits.to_bytes(num_bytes, "little"), num_bytes)

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error


class SimulatedCompiler(GrammarCompiler):
    """The real one but for its thread: a grammar is compiled when the simulator says so."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(Path(), vocab_size, ())
        self._worker: Any = self
        self._todo: deque[tuple[Future[Any], Grammar]] = deque()

    def submit(self, _compile: Any, grammar: Grammar) -> Future[Any]:
        future: Future[Any] = Future()
        self._todo.append((future, grammar))
        return future

    def advance(self) -> bool:
        """One grammar is compiled; False when none is to be."""
        if not self._todo:
            return False
        future, grammar = self._todo.popleft()
        if not future.set_running_or_notify_cancel():
            return self.advance()
        if grammar.text == "bad":
            future.set_exception(BadGrammar("as told"))
        elif grammar.text == "broken":
            future.set_exception(RuntimeError("as told"))
        else:
            future.set_result(SimulatedMatcher(grammar.text, self._vocab_size))
        return True
