"""Where submissions with a grammar wait until it is compiled."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backend.structured_output.grammar_compiler import MAX_PENDING, BadGrammar, TooManyGrammars
from penstock.shm.messages import Failure, FailureCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from llguidance import LLMatcher

    from penstock.backend.structured_output.grammar_compiler import GrammarCompiler
    from penstock.shm.link.events import Submission
    from penstock.shm.messages import Grammar


@dataclass(frozen=True, slots=True)
class Waiting:
    """A submission whose grammar is being compiled."""

    submission: Submission
    arrived_s: float
    deadline_s: float | None
    grammar: Grammar
    future: Future[LLMatcher]


class GrammarQueue:
    """Owned by `Requests`. wake is called, from another thread, when there may be something in `settled`."""

    def __init__(self, compiler: GrammarCompiler | None, wake: Callable[[], None], max_waiting: int) -> None:
        """compiler is None where the model has no tokenizer that grammars could be compiled with."""
        self._compiler = compiler
        self._wake = wake
        self._max_waiting = max_waiting
        self._waiting: dict[tuple[int, int], Waiting] = {}
        self._num_asking: Counter[Grammar] = Counter()
        """How many of those wait for each."""
        self._done: deque[Waiting] = deque()
        """Those whose grammar is compiled, put there by the compiler's thread; some have left since."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def find(self, frontend: int, request_id: int) -> Waiting | None:
        return self._waiting.get((frontend, request_id))

    def take(
        self, submission: Submission, grammar: Grammar, arrived_s: float, deadline_s: float | None
    ) -> LLMatcher | Failure | None:
        """A matcher where the grammar is at hand; None where the submission waits for it here from now on."""
        request_id = submission.submit.request_id
        if self._compiler is None:
            text = "the model has no tokenizer that grammars could be compiled with"
            return Failure(request_id, FailureCode.BAD_GRAMMAR, text=text)
        try:
            matcher = self._compiler.compiled(grammar)
        except BadGrammar as error:
            return Failure(request_id, FailureCode.BAD_GRAMMAR, text=str(error))
        if matcher is not None:
            return matcher
        if len(self._waiting) >= self._max_waiting:
            return Failure(request_id, FailureCode.OVERLOADED, self._max_waiting)
        try:
            future = self._compiler.compile(grammar)
        except TooManyGrammars:
            return Failure(request_id, FailureCode.OVERLOADED, MAX_PENDING)
        waiting = Waiting(submission, arrived_s, deadline_s, grammar, future)
        self._waiting[submission.frontend, request_id] = waiting
        self._num_asking[grammar] += 1
        future.add_done_callback(lambda _: self._note_done(waiting))
        return None

    def _note_done(self, waiting: Waiting) -> None:
        self._done.append(waiting)
        self._wake()

    def settled(self) -> list[tuple[Waiting, LLMatcher | Failure]]:
        """Those whose grammar has been compiled, or found to be bad. Costs nothing for those that go on waiting."""
        outcomes: list[tuple[Waiting, LLMatcher | Failure]] = []
        while self._done:
            waiting = self._done.popleft()
            submission = waiting.submission
            if self.find(submission.frontend, submission.request_id) is not waiting or self._compiler is None:
                continue
            self._take_out(submission.frontend, submission.request_id)
            try:
                outcomes.append((waiting, self._compiler.finished(waiting.grammar, waiting.future)))
            except BadGrammar as error:
                failure = Failure(submission.request_id, FailureCode.BAD_GRAMMAR, text=str(error))
                outcomes.append((waiting, failure))
        return outcomes

    def forget(self, frontend: int, request_id: int) -> bool:
        """True where the request waited here. A grammar that nobody else waits for is not begun any more; one that is
        being compiled will be there for others."""
        waiting = self._take_out(frontend, request_id)
        if waiting is not None and waiting.grammar not in self._num_asking and self._compiler is not None:
            self._compiler.give_up(waiting.grammar)
        return waiting is not None

    def forget_frontend(self, frontend: int) -> int:
        """How many of its requests waited here."""
        keys = [key for key in self._waiting if key[0] == frontend]
        return sum(self.forget(*key) for key in keys)

    def _take_out(self, frontend: int, request_id: int) -> Waiting | None:
        if (waiting := self._waiting.pop((frontend, request_id), None)) is None:
            return None
        self._num_asking[waiting.grammar] -= 1
        if not self._num_asking[waiting.grammar]:
            del self._num_asking[waiting.grammar]
        return waiting
