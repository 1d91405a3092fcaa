"""Which tokens constraints allow, computed from their definition; and grammars that cost nothing to compile.

A grammar's text is "SEED LENGTH": the allowed tokens follow from the seed and the previous token, and after LENGTH
tokens the grammar reaches its limit. "bad" does not compile, or not within the limits. "broken" makes the compiler
itself fail. "deadly" kills each child that compiles it.
"""

from __future__ import annotations

import ctypes
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.backend.structured_output.compile_grammar import CompiledGrammar
from penstock.backend.structured_output.compile_pool import CompilerFailed
from penstock.backend.structured_output.grammar_costs import BadGrammar, Pace
from penstock.backend.structured_output.late_masks import LateMasks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher

    from penstock.backend.structured_output.constraints import LateMask, SequenceConstraints
    from penstock.shm.messages import Constraints, Grammar
    from tests.simulation.world import World

UNSOUND = ("bad", "broken", "deadly")


def _follows(text: str, history: Sequence[int], vocab_size: int) -> set[int] | None:
    """Tokens that the grammar allows after history; None if it has reached its limit."""
    seed, length = map(int, text.split())
    if len(history) >= length:
        return None
    before = history[-1] if history else vocab_size
    return {token for token in range(vocab_size) if (token * 7 + before * 5 + seed) % 3} or {0}


def _accepts(text: str, history: Sequence[int]) -> bool:
    """Whether what was written is a whole text of the grammar, after which a stop token may come."""
    seed, _ = map(int, text.split())
    return (seed + len(history) + sum(history[-1:])) % 3 == 0


@dataclass
class Rules:
    """The oracle of `penstock.backend.structured_output.constraints`. It has no state: tokens so far decide
    everything."""

    constraints: Constraints
    stop_ids: frozenset[int]
    vocab_size: int

    def allowed(self, generated: list[int]) -> set[int] | None:
        """Tokens that may follow these; None if none may, and the request fails."""
        constraints = self.constraints
        place = len(generated) - constraints.thinking_budget_tokens
        is_due = constraints.thinking_budget_tokens and 0 <= place < len(constraints.thinking_end)
        if is_due and _end_of(constraints.thinking_end, generated) is None:
            return {constraints.thinking_end[place]}
        left = set(constraints.allowed_token_ids or range(self.vocab_size))
        begun = _end_of(constraints.grammar_after, generated) if constraints.grammar_after else 0
        if constraints.grammar is not None and begun is not None:
            following = _follows(constraints.grammar.text, generated[begun:], self.vocab_size)
            left &= following or set()
            if not left:
                return None
        may_stop = len(generated) >= constraints.min_tokens and begun is not None
        if constraints.grammar is not None and begun is not None:
            may_stop &= _accepts(constraints.grammar.text, generated[begun:])
        if not may_stop:
            left = left - self.stop_ids or left
        ends = {
            run[-1] for run in constraints.bad_words if generated[len(generated) - len(run) + 1 :] == list(run[:-1])
        }
        return left - ends or left


def _end_of(run: tuple[int, ...], tokens: list[int]) -> int | None:
    """The end of the first occurrence of the run."""
    ends = range(len(run), len(tokens) + 1)
    return next((end for end in ends if tuple(tokens[end - len(run) : end]) == run), None)


class SimulatedMatcher:
    """Replaces LLMatcher."""

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
            self._error = f"{num_tokens} of {len(self._history)} tokens rolled back"
            return False
        del self._history[len(self._history) - num_tokens :]
        return True

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        following = _follows(self._text, self._history, self._vocab_size)
        if following is None:
            self._error = "the limit is reached"
            return
        bits = sum(1 << token for token in following)
        ctypes.memmove(pointer, bits.to_bytes(num_bytes, "little"), num_bytes)

    def is_accepting(self) -> bool:
        return _accepts(self._text, self._history)

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error


class SlowPace(Pace):
    """All masks take long, whatever they took."""

    @property
    def is_slow(self) -> bool:
        return True


class QuickPace(Pace):
    """The machine that runs the simulator may be slow; the simulated one is not."""

    def note(self, spent_ns: int) -> None:
        pass


class SimulatedLateMasks(LateMasks):
    """A late mask is done when the simulator decides."""

    def __init__(self, world: World, vocab_size: int) -> None:
        super().__init__(vocab_size, lambda: None)
        self._world = world

    def is_ready(self, constraints: SequenceConstraints, num_tokens: int) -> bool:
        is_ready = super().is_ready(constraints, num_tokens)
        self._world.covered["masks late"] += not is_ready
        return is_ready

    def _put(self, late: LateMask) -> None:
        self._turns.put(late)

    def advance_one(self) -> None:
        if (late := self._turns.take()) is not None and not self.work_on(late):
            self._turns.put(late)

    def _consume(self, matcher: LLMatcher, token_id: int) -> bool:
        return matcher.consume_token(token_id)


class SimulatedPool:
    """Replaces CompilePool: a grammar is compiled when the simulator decides."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._todo: deque[tuple[Future[CompiledGrammar], Grammar]] = deque()

    def submit(self, grammar: Grammar, _tenant: bytes) -> Future[CompiledGrammar]:
        future: Future[CompiledGrammar] = Future()
        self._todo.append((future, grammar))
        return future

    def add_tenant(self, _future: Future[CompiledGrammar], _grammar: Grammar, _tenant: bytes) -> None:
        pass

    def cancel(self, future: Future[CompiledGrammar]) -> bool:
        return future.cancel()

    def close(self) -> None:
        pass

    def advance(self) -> bool:
        """Compile one grammar. False if none is waiting."""
        if not self._todo:
            return False
        future, grammar = self._todo.popleft()
        if not future.set_running_or_notify_cancel():
            return self.advance()
        match grammar.text:
            case "bad":
                future.set_exception(BadGrammar("planted"))
            case "broken":
                future.set_exception(RuntimeError("planted"))
            case "deadly":
                future.set_exception(CompilerFailed("planted"))
            case text:
                matcher: Any = SimulatedMatcher(text, self._vocab_size)
                is_slow = int(text.split()[0]) % 3 == 0
                future.set_result(CompiledGrammar(matcher, -1, pace=SlowPace() if is_slow else QuickPace()))
        return True
