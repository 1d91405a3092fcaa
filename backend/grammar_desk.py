"""Where submissions with a grammar wait until it is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.grammars import BadGrammar
from shm.wire import Failure, FailureCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from llguidance import LLMatcher

    from backend.grammars import GrammarCompiler
    from shm.link import Submission
    from shm.wire import Grammar


class GrammarDesk:
    """Owned by `Requests`. wake is called, from another thread, when there may be something in `settled`."""

    def __init__(self, compiler: GrammarCompiler | None, wake: Callable[[], None], max_waiting: int) -> None:
        """compiler is None where the model has no tokenizer that grammars could be compiled with."""
        self._compiler = compiler
        self._wake = wake
        self._max_waiting = max_waiting
        self._waiting: dict[tuple[int, int], tuple[Submission, Grammar, Future[LLMatcher]]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def holds(self, frontend: int, request_id: int) -> bool:
        return (frontend, request_id) in self._waiting

    def take(self, submission: Submission, grammar: Grammar) -> LLMatcher | Failure | None:
        """A matcher where the grammar is at hand; None where the submission waits for it here from now on."""
        request_id = submission.submit.request_id
        if self._compiler is None:
            text = "the model has no tokenizer that grammars could be compiled with"
            return Failure(request_id, FailureCode.BAD_GRAMMAR, text=text)
        if (matcher := self._compiler.compiled(grammar)) is not None:
            return matcher
        if len(self._waiting) >= self._max_waiting:
            return Failure(request_id, FailureCode.OVERLOADED, self._max_waiting)
        try:
            future = self._compiler.compile(grammar)
        except BadGrammar as error:
            return Failure(request_id, FailureCode.BAD_GRAMMAR, text=str(error))
        self._waiting[submission.frontend, request_id] = submission, grammar, future
        future.add_done_callback(lambda _: self._wake())
        return None

    def settled(self) -> list[tuple[Submission, LLMatcher | Failure]]:
        """Those whose grammar has been compiled, or found to be bad, in the order in which they came."""
        if not self._waiting or self._compiler is None:
            return []
        outcomes: list[tuple[Submission, LLMatcher | Failure]] = []
        for key in [key for key, (_, _, future) in self._waiting.items() if future.done()]:
            submission, grammar, future = self._waiting.pop(key)
            try:
                outcomes.append((submission, self._compiler.finished(grammar, future)))
            except BadGrammar as error:
                failure = Failure(submission.submit.request_id, FailureCode.BAD_GRAMMAR, text=str(error))
                outcomes.append((submission, failure))
        return outcomes

    def forget(self, frontend: int, request_id: int) -> bool:
        """True where the request waited here; its grammar is compiled all the same, for others."""
        return self._waiting.pop((frontend, request_id), None) is not None

    def forget_frontend(self, frontend: int) -> int:
        """How many of its requests waited here."""
        keys = [key for key in self._waiting if key[0] == frontend]
        for key in keys:
            del self._waiting[key]
        return len(keys)
