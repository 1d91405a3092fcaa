"""Submissions that wait until their grammar is compiled."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from penstock.backend.structured_output.compile_grammar import CompiledGrammar
from penstock.backend.structured_output.compile_pool import CompilerFailed
from penstock.backend.structured_output.grammar_cache import MAX_PENDING, GrammarCache, TooManyGrammars
from penstock.backend.structured_output.grammar_costs import BadGrammar, GrammarMemoryFull
from penstock.process.admission import DrainRate, is_over_share
from penstock.shm.link.events import Submission
from penstock.shm.messages import Failure, FailureCode, Generate, Grammar

_DRAIN_S = 1.0
"""After this much of a drain, requests that still wait for their grammar are refused."""


@dataclass(frozen=True, slots=True)
class WaitingSubmission:
    """A submission whose grammar is being compiled."""

    submission: Submission[Generate]
    arrived_s: float
    deadline_s: float | None
    grammar: Grammar
    future: Future[CompiledGrammar]


class GrammarQueue:
    """Owned by `RequestTable`, on the main thread. A thread of the compiler calls `wake` when a grammar is compiled.

    max_waiting requests may wait, and beyond that those of a tenant with less than its share of the places
    (`tenant_places`).
    """

    def __init__(self, compiler: GrammarCache | None, wake: Callable[[], None], max_waiting: int) -> None:
        """compiler is None when the model has no tokenizer.json; then every grammar is refused."""
        self._compiler = compiler
        self._wake = wake
        self._max_waiting = max_waiting
        self._waiting: dict[tuple[int, int], WaitingSubmission] = {}
        self._num_waiting_for: Counter[Grammar] = Counter()
        self.num_waiting_of: Counter[bytes] = Counter()
        """Waiting requests of each tenant."""
        self._num_settled = 0
        self._settle_rate = DrainRate()
        self._drain_ends_s: float | None = None
        self._done: deque[WaitingSubmission] = deque()
        """Filled by the compiler's threads. Some of these submissions have been removed since."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def find(self, frontend: int, request_id: int) -> WaitingSubmission | None:
        return self._waiting.get((frontend, request_id))

    def submit(
        self, submission: Submission[Generate], grammar: Grammar, arrived_s: float, deadline_s: float | None
    ) -> CompiledGrammar | Failure | None:
        """Return the grammar if it is already compiled, a failure, or None: then the submission waits here.

        Limits do not apply to one that was admitted before a backend's death.
        """
        request_id, tenant = submission.request_id, submission.message.tenant
        is_new = not submission.message.admitted_ns
        if self._compiler is None:
            text = "this model has no tokenizer.json, which grammars need"
            return Failure(request_id, FailureCode.BAD_GRAMMAR, text=text)
        try:
            compiled = self._compiler.find_compiled(grammar)
        except BadGrammar as error:
            return Failure(request_id, FailureCode.BAD_GRAMMAR, text=str(error))
        if compiled is not None:
            return compiled
        if is_new and is_over_share(self.num_waiting_of, tenant, self._max_waiting):
            return self._overload(request_id, self._max_waiting)
        try:
            future = self._compiler.compile(grammar, tenant, is_limited=is_new)
        except TooManyGrammars:
            return self._overload(request_id, MAX_PENDING)
        waiting = WaitingSubmission(submission, arrived_s, deadline_s, grammar, future)
        self._waiting[submission.frontend, request_id] = waiting
        self._num_waiting_for[grammar] += 1
        self.num_waiting_of[tenant] += 1
        future.add_done_callback(lambda _: self._note_done(waiting))
        return None

    def _overload(self, request_id: int, limit: int = 0, text: str = "") -> Failure:
        """The refusal; its retry time is when all waiting requests will be settled at the recent rate."""
        retry_after_s = self._settle_rate.retry_after_s(len(self._waiting), self._num_settled)
        return Failure(request_id, FailureCode.OVERLOADED, limit, text=text, retry_after_s=retry_after_s)

    def _note_done(self, waiting: WaitingSubmission) -> None:
        self._done.append(waiting)
        self._wake()

    def take_settled(self) -> list[tuple[WaitingSubmission, CompiledGrammar | Failure]]:
        """Remove and return the submissions whose grammar is compiled or bad. Those still waiting cost nothing."""
        outcomes: list[tuple[WaitingSubmission, CompiledGrammar | Failure]] = []
        while self._done:
            waiting = self._done.popleft()
            submission = waiting.submission
            if self._compiler is None:
                continue
            if self.find(submission.frontend, submission.request_id) is not waiting:
                self._compiler.settle_abandoned(waiting.grammar, waiting.future, submission.message.tenant)
                continue
            self._pop(submission.frontend, submission.request_id)
            self._num_settled += 1
            self._settle_rate.note(self._num_settled)
            outcomes.append((waiting, self._outcome_of(self._compiler, waiting)))
        return outcomes

    def _outcome_of(self, compiler: GrammarCache, waiting: WaitingSubmission) -> CompiledGrammar | Failure:
        request_id, tenant = waiting.submission.request_id, waiting.submission.message.tenant
        try:
            return compiler.take_result(waiting.grammar, waiting.future, tenant)
        except BadGrammar as error:
            return Failure(request_id, FailureCode.BAD_GRAMMAR, text=str(error))
        except GrammarMemoryFull as error:
            return self._overload(request_id, text=str(error))
        except CompilerFailed:
            return Failure(request_id, FailureCode.INTERNAL)

    def drain(self, now_s: float) -> list[Submission[Generate]]:
        """Remove and return all submissions once a drain has lasted for _DRAIN_S. Call it in each turn of the drain.

        Their grammars are not compiled unless compilation has begun: one may take its whole time limit.
        """
        if self._drain_ends_s is None:
            self._drain_ends_s = now_s + _DRAIN_S
        if now_s < self._drain_ends_s:
            return []
        submissions = [waiting.submission for waiting in self._waiting.values()]
        for submission in submissions:
            self.remove(submission.frontend, submission.request_id)
        return submissions

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
        request_id, tenant = waiting.submission.request_id, waiting.submission.message.tenant
        self.num_waiting_of[tenant] -= 1
        if not self.num_waiting_of[tenant]:
            del self.num_waiting_of[tenant]
        return waiting
