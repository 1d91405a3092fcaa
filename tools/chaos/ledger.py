"""The clients' books: how each request ended, whether that was right, and which numbers do not balance."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_MAX_EXAMPLES = 5
"""Examples kept of each kind of imbalance; all are counted."""


class EndKind(enum.Enum):
    """How a request ended. Each request ends in exactly one of these."""

    COMPLETE = "complete and right"
    DROPPED = "dropped by us"
    REFUSED = "refused as documented"
    CUT = "cut by a killed worker"
    """The connection of a client whose worker had just been killed: nobody can answer it."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, or the received part of one. A finish_reason is empty until it is known."""

    choices: tuple[ChoiceAnswer, ...]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Tokens by the usage; 0 without a usage."""
    has_token_ids: bool = True
    refusal: tuple[int, str] | None = None
    """Status and code of the error, if that is the answer. A stream that has begun has the code in an event."""

    @property
    def received_tokens(self) -> int:
        """Without ids they are known only from the usage."""
        if not self.has_token_ids:
            return self.completion_tokens
        return sum(len(choice.token_ids) for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Ending:
    """One request as a client saw it. Times are time.monotonic()."""

    index: int
    started_s: float
    ended_s: float
    is_dropped: bool = False
    """This client hung up before the end."""
    answer: Answer | None = None
    status: int = 0
    code: str = ""
    """The code of the error object, if there was one."""
    has_retry_after: bool = False
    fault: str = ""
    """Why the answer is incomplete, if nobody hung up and no status explains it."""
    is_broken: bool = False
    """The connection ended early, or a proxy reported that with a 502."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """The refusals that a request may meet: pairs of status and code. A stream that has begun has the code of its
    refusal in an event: its status is 200."""

    refusals: frozenset[tuple[int, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class DoneFault:
    """A fault that was injected."""

    kind: str
    at_s: float
    """time.monotonic()."""
    took_s: float
    """Time until the server recovered: the victim's end, if it drains, and then both frontends ready."""


@dataclass(slots=True)
class WorkerKill:
    at_s: float
    """time.monotonic()."""
    num_connections: int
    """Its TCP connections: at most as many requests are cut."""
    gone_s: float = math.inf
    """Time until which its connections were open: proxies sent requests on them that nobody read."""
    num_cut: int = 0

    def explains(self, ending: Ending) -> bool:
        """Whether the request began before everyone knew of the kill, and broke at once.

        One that breaks later had another worker.
        """
        began_early = ending.started_s <= self.gone_s + _CLOSE_SEEN_S
        return began_early and self.at_s <= ending.ended_s <= self.gone_s + _BREAK_SEEN_S


_CLOSE_SEEN_S = 0.25
"""A client or proxy on a busy machine may still send on an idle connection that the system has closed."""
_BREAK_SEEN_S = 3.0
"""A slow reader sees the end of its stream after its pause of at most 1 s, or later on a busy machine."""
NEEDS_RETRY_AFTER = frozenset({429, 503, 529})


def difference(got: Answer, right: Answer, *, is_whole: bool) -> str:
    """Say where an answer departs from the right one; empty if it does not. A part must be a beginning of it."""
    if is_whole and (got.refusal or ("",))[-1] != (right.refusal or ("",))[-1]:
        return f"{got.refusal or 'an answer'} instead of {right.refusal or 'an answer'}"
    if is_whole and len(got.choices) != len(right.choices):
        return f"{len(got.choices)} choices instead of {len(right.choices)}"
    for index, (have, want) in enumerate(zip(got.choices, right.choices, strict=False)):
        count = len(have.token_ids)
        if have.token_ids != want.token_ids[:count]:
            pairs = enumerate(zip(have.token_ids, want.token_ids, strict=False))
            place = next((place for place, (a, b) in pairs if a != b), len(want.token_ids))
            return f"choice {index} departs at token {place} of {len(want.token_ids)}"
        if not want.text.startswith(have.text):
            return f"choice {index} has other text for the same tokens"
        if is_whole and count != len(want.token_ids):
            return f"choice {index} has {count} tokens instead of {len(want.token_ids)}"
        if is_whole and have.text != want.text:
            return f"choice {index} has {len(have.text)} characters instead of {len(want.text)}"
        if is_whole and have.finish_reason != want.finish_reason:
            return f'choice {index} ended with "{have.finish_reason}" instead of "{want.finish_reason}"'
    if is_whole and got.completion_tokens != got.received_tokens:
        return f"the usage says {got.completion_tokens} tokens; {got.received_tokens} arrived"
    if is_whole and got.completion_tokens != right.completion_tokens:
        return f"the usage says {got.completion_tokens} tokens instead of {right.completion_tokens}"
    if is_whole and got.prompt_tokens != right.prompt_tokens:
        return f"the usage says {got.prompt_tokens} prompt tokens instead of {right.prompt_tokens}"
    return ""


@dataclass
class Ledger:
    """Every request is opened once and ended once. Everything that does not balance is in `imbalances`, by name."""

    say: Callable[[str], None] = print
    """Receives each imbalance as it is found."""
    allow_refusals: bool = False
    """Let any request be refused with a 429 or 503 that has a Retry-After."""
    ends: Counter[EndKind] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    tokens_received: int = 0
    num_choices: int = 0
    """Choices of all requests that have ended: no more can have reached the backend."""
    num_complete_choices: int = 0
    imbalances: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    _open: dict[int, int] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _kills: list[WorkerKill] = field(default_factory=list)

    @property
    def num_ended(self) -> int:
        return len(self._ended)

    @property
    def num_connections_killed(self) -> int:
        """Connections that killed workers had: the bound on the requests that were cut."""
        return sum(kill.num_connections for kill in self._kills)

    def note_kill(self, at_s: float, num_connections: int) -> WorkerKill:
        """Note that a worker is killed: its connections are lost. The caller sets the time when it was gone."""
        self._kills.append(kill := WorkerKill(at_s, num_connections))
        return kill

    def open(self, index: int, choices: int) -> None:
        if index in self._open or index in self._ended:
            self.imbalance("a request was sent twice", f"request {index}")
        self._open[index] = choices

    def end(self, ending: Ending, right: Answer, allowance: Allowance) -> EndKind:
        """Book one request's end."""
        if ending.index in self._ended:
            self.imbalance("a request ended twice", f"request {ending.index}")
        elif ending.index not in self._open:
            self.imbalance("a request ended that was never sent", f"request {ending.index}")
        choices = self._open.pop(ending.index, 0)
        self.num_choices += choices
        self._ended.add(ending.index)
        if ending.answer is not None:
            self.tokens_received += ending.answer.received_tokens
        kind = self._judge(ending, right, allowance)
        self.ends[kind] += 1
        self.num_complete_choices += choices if kind is EndKind.COMPLETE else 0
        return kind

    def _judge(self, ending: Ending, right: Answer, allowance: Allowance) -> EndKind:
        name = f"request {ending.index}"
        if ending.answer is not None:
            is_whole = not (ending.is_dropped or ending.fault)
            wrong = difference(ending.answer, right, is_whole=is_whole)
            if wrong:
                self.imbalance("an answer is wrong", f"{name}: {wrong}")
                return EndKind.FAILED
        if ending.is_dropped:
            return EndKind.DROPPED
        if ending.is_broken and any(kill.explains(ending) for kill in self._kills):
            return self._judge_cut(ending)
        if right.refusal is not None and ending.code == right.refusal[1]:
            self.refusals[f"{ending.status} {ending.code}"] += 1
            return EndKind.REFUSED
        if ending.fault and (ending.status, ending.code) not in allowance.refusals:
            self.imbalance("a request failed", f"{name}: {ending.fault}")
            return EndKind.FAILED
        if ending.status != 200 or ending.code:
            return self._judge_refusal(ending, allowance)
        return EndKind.COMPLETE

    def _judge_cut(self, ending: Ending) -> EndKind:
        """Find the latest kill that explains the cut request, and charge it."""
        for kill in reversed(self._kills):
            if kill.explains(ending) and kill.num_cut < kill.num_connections:
                kill.num_cut += 1
                return EndKind.CUT
        self.imbalance("more requests were cut than a killed worker had connections", f"request {ending.index}")
        return EndKind.FAILED

    def _judge_refusal(self, ending: Ending, allowance: Allowance) -> EndKind:
        refusal = f"{ending.status} {ending.code}".strip()
        self.refusals[refusal] += 1
        name = f"request {ending.index}: {refusal}"
        if ending.status in NEEDS_RETRY_AFTER and not ending.has_retry_after:
            self.imbalance("a refusal has no Retry-After", name)
            return EndKind.FAILED
        is_tolerated = self.allow_refusals and ending.status in NEEDS_RETRY_AFTER and ending.code
        if (ending.status, ending.code) in allowance.refusals or is_tolerated:
            return EndKind.REFUSED
        self.imbalance("a request was refused that should not be", name)
        return EndKind.FAILED

    def close(self) -> None:
        """Close the books: a request that is still open is lost."""
        for index in self._open:
            self.imbalance("a request never ended", f"request {index}")
        self._open.clear()
        total = sum(self.ends.values())
        if total != self.num_ended:
            self.imbalance("the ends do not add up", f"{total} ends of {self.num_ended} requests")

    def imbalance(self, name: str, example: str) -> None:
        self.imbalances[name] += 1
        self.say(f"{name}: {example}")
        examples = self.examples.setdefault(name, [])
        if len(examples) < _MAX_EXAMPLES:
            examples.append(example)

    def expect(self, what: str, got: Any, want: Any) -> None:
        """Record the difference between a number and its right value."""
        if got != want:
            self.imbalance(what, f"{got} instead of {want}")
