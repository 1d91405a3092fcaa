"""Submissions that wait until their grammar is compiled."""

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
class WaitingSubmission:
    """A submission whose grammar is being compiled."""

    submission: Submission
    arrived_s: float
    deadline_s: float | None
    grammar: Grammar
    future: Future[LLMatcher]


class GrammarQueue:
    """Owned by `OpenRequests`, on the main thread. The compiler's thread calls `wake` when a grammar is compiled."""

    def __init__(self, compiler: GrammarCompiler | None, wake: Callable[[], None], max_waiting: int) -> None:
        """compiler is None when the model has no tokenizer.json; then every grammar is refused."""
        self._compiler = compiler
        self._wake = wake
        self._max_waiting = max_waiting
        self._waiting: dict[tuple[int, int], WaitingSubmission] = {}
        self._num_waiting_for: Counter[Grammar] = Counter()
        self._done: deque[WaitingSubmission] = deque()
        """Filled by the compiler's thread. Some of these submissions have been removed since."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def find(self, frontend: int, request_id: int) -> WaitingSubmission | None:
        return self._waiting.get((frontend, request_id))

    def submit(
        self, submission: Submission, grammar: Grammar, arrived_s: float, deadline_s: float | None
    ) -> LLMatcher | Failure | None:
        """A matcher if the grammar is compiled already, a failure, or None: the submission waits here from now on."""
        request_id = submission.submit.request_id
        if self._compiler is None:
            text = "this model has no tokenizer.json, which grammars need"
            return Failure(request_id, FailureCode.BAD_GRAMMAR, text=text)
        try:
            matcher = self._compiler.find_compiled(grammar)
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
        waiting = WaitingSubmission(submission, arrived_s, deadline_s, grammar, future)
        self._waiting[submission.frontend, request_id] = waiting
        self._num_waiting_for[grammar] += 1
        future.add_done_callback(lambda _: self._note_done(waiting))
        return None

    def _note_done(self, waiting: WaitingSubmission) -> None:
        self._done.append(waiting)
        self._wake()

    def take_settled(self) -> list[tuple[WaitingSubmission, LLMatcher | Failure]]:
        """Remove and return the submissions whose grammar is compiled or bad. Those still waiting cost nothing."""
        outcomes: list[tuple[WaitingSubmission, LLMatcher | Failure]] = []
        while self._done:
            waiting = self._done.popleft()
            submission = waiting.submission
            if self.find(submission.frontend, submission.request_id) is not waiting or self._compiler is None:
                continue
            self._pop(submission.frontend, submission.request_id)
            try:
                outcomes.append((waiting, self._compiler.take_result(waiting.grammar, waiting.future)))
            except BadGrammar as error:
                failure = Failure(submission.request_id, FailureCode.BAD_GRAMMAR, text=str(error))
                outcomes.append((waiting, failure))
        return outcomes

    def remove(self, frontend: int, request_id: int) -> bool:
        """Return whether the request waited here. Cancels its grammar if no other request waits for it; one that is
        being compiled already is finished and cached."""
        waiting = self._pop(frontend, request_id)
        if waiting is not None and waiting.grammar not in self._num_waiting_for and self._compiler is not None:
            self._compiler.cancel(waiting.grammar)
        return waiting is not None

    def remove_frontend(self, frontend: int) -> int:
        """Remove all requests of the frontend and return how many waited here."""
        keys = [key for key in self._waiting if key[0] == frontend]
        return sum(self.remove(*key) for key in keys)

    def _pop(self, frontend: int, request_id: int) -> WaitingSubmission | None:
        if (waiting := self._waiting.pop((frontend, request_id), None)) is None:
            return None
        self._num_waiting_for[waiting.grammar] -= 1
        if not self._num_waiting_for[waiting.grammar]:
            del self._num_waiting_for[waiting.grammar]
        return waiting
