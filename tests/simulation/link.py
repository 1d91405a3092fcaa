"""The way between the processes, without processes: frontends, what they send, and what reaches them when."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.shm.link.events import Cancellation, FrontendDeath, Submission
from penstock.shm.messages import EventLogprobs, Failure, FailureCode, Finish, Started, Submit
from tests.simulation.violations import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.shm.link.events import LinkEvent
    from tests.simulation.workload import Ask
    from tests.simulation.world import World

    Message = tuple[int, int, Finish, Failure | None]


class LentPrompt:
    """Stands where a `Loan` of embeddings stands: a token's is the token. Zeroes once its request is over."""

    device_reads = False

    def __init__(self, tokens: list[int]) -> None:
        self._rows = array("f", tokens)
        self._is_open = True

    def read_rows(self, first: int, num_rows: int) -> bytes:
        if first + num_rows > len(self._rows):
            raise Violation(f"rows {first} to {first + num_rows} of {len(self._rows)} are read")
        return self._rows[first : first + num_rows].tobytes() if self._is_open else bytes(4 * num_rows)

    def end(self) -> None:
        self._is_open = False


class Frontend:
    """A process with clients: it sends in order, reads when it likes, and returns a credit for each message read."""

    def __init__(self, epoch: int, credit: int) -> None:
        self.epoch = epoch
        self.asks: dict[int, Ask] = {}
        """Those without an end, by request id."""
        self.wire: deque[LinkEvent] = deque()
        """Sent, and not yet with the backend."""
        self.inbox: deque[list[Message]] = deque()
        self.credit = credit

    def submit(self, ask: Ask, request_id: int, timeout_ms: int) -> None:
        self.asks[request_id] = ask
        tokens = array("i", ask.prompt + ask.got).tobytes()
        submit = Submit(
            request_id=request_id,
            tokens=tokens,
            num_prompt_tokens=len(ask.prompt),
            max_tokens=ask.max_tokens,
            sampling=ask.sampling,
            stop_token_ids=ask.stop_ids,
            salt=ask.salt,
            may_share=ask.may_share,
            priority=ask.priority,
            timeout_ms=timeout_ms,
            constraints=ask.constraints,
            num_prompt_logprobs=ask.num_prompt_logprobs,
        )
        if ask.is_embedded and not ask.got:
            prompt: Any = LentPrompt(ask.prompt)
            self.wire.append(Submission(self.epoch, submit, b"", embeddings=prompt))
        else:
            self.wire.append(Submission(self.epoch, submit, tokens))
        ask.num_lives += 1

    def cancel(self, request_id: int) -> None:
        self.wire.append(Cancellation(self.epoch, request_id))
        if (ask := self.asks.pop(request_id, None)) is not None:
            ask.ended = Finish.CANCELLED

    def read(self) -> None:
        """One message, if there is one."""
        if not self.inbox:
            return
        self.credit += 1
        for request_id, token_id, finish, _ in self.inbox.popleft():
            if (ask := self.asks.get(request_id)) is None:
                continue  # cancelled, and this was on its way
            if token_id >= 0:
                ask.got.append(token_id)
            if finish:
                ask.ended = finish
                del self.asks[request_id]


@dataclass(slots=True)
class Open:
    """A request that the backend has taken in and neither ended nor been told to forget."""

    ask: Ask
    next_index: int
    """Which of the ask's tokens is due."""
    deadline_s: float | None
    is_started: bool = False
    num_scored: int = 0
    """Tokens of its prompt that it has been told of; all, where it is not to be."""
    is_judged: bool = False
    """It was neither refused nor ended at once."""
    embeddings: Any = None
    """Its `LentPrompt`, where it has one."""

    def end_loan(self) -> None:
        if self.embeddings is not None:
            self.embeddings.end()


class SimulatedLink:
    """Stands where BackendLink stands, for one life of the backend. Judges every word that the engine says."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._arrived: list[LinkEvent] = []
        self._outboxes: dict[int, list[Message]] = {}
        self.open: dict[tuple[int, int], Open] = {}
        self.num_accepted = 0

    def take(self, event: LinkEvent) -> None:
        self._arrived.append(event)

    def receive(self) -> Iterator[LinkEvent]:
        """What follows from an event holds from the moment at which the engine has seen to it."""
        arrived, self._arrived = self._arrived, []
        for event in arrived:
            match event:
                case Submission():
                    yield from self._receive_submission(event)
                case Cancellation(epoch, request_id):
                    heard = self.open.get((epoch, request_id))
                    self._world.judge.note_cancel(heard, epoch, request_id)
                    if heard is not None:
                        heard.end_loan()
                    yield event
                    self.open.pop((epoch, request_id), None)
                case FrontendDeath(epoch):
                    for (owner, _), heard in self.open.items():
                        if owner == epoch:
                            heard.end_loan()
                    yield event
                    self.open = {key: heard for key, heard in self.open.items() if key[0] != epoch}
                    self._outboxes.pop(epoch, None)

    def _receive_submission(self, event: Submission) -> Iterator[LinkEvent]:
        world, submit = self._world, event.submit
        key = event.frontend, event.request_id
        ask = world.ask_of(*key)
        deadline_s = world.now_s + submit.timeout_ms / 1000 if submit.timeout_ms else None
        num_given_tokens = len(event.tokens) // 4 - submit.num_prompt_tokens if event.tokens else 0
        heard = Open(ask, num_given_tokens, deadline_s, embeddings=event.embeddings)
        world.covered["embedded"] += event.embeddings is not None
        if heard.next_index or not ask.scores:
            heard.num_scored = len(ask.scores)
        self.open[key] = heard
        yield event

    def push(
        self,
        frontend: int,
        request_id: int,
        token_id: int,
        finish: Finish = Finish.NONE,
        started: Started | None = None,
        failure: Failure | None = None,
        logprobs: EventLogprobs | None = None,
    ) -> None:
        heard = self.open.get((frontend, request_id))
        if heard is None:
            raise Violation(f"{frontend}/{request_id} is told {token_id} {finish.name} and is not open")
        if token_id >= 0:
            self._judge_logprobs(heard, logprobs)
            self._judge_token(heard, token_id, started)
        elif finish is Finish.NONE:
            raise Violation(f"{heard.ask} is told nothing")
        if finish:
            self._judge_finish(heard, (frontend, request_id), finish, failure)
            self.open.pop((frontend, request_id)).end_loan()
        self._outboxes.setdefault(frontend, []).append((request_id, token_id, finish, failure))
        if self._world.log is not None:
            self._world.log(f"  → {heard.ask} {token_id} {finish.name if finish else ''}")

    def note_preemption(self, frontend: int, request_id: int) -> None:
        pass

    def push_tokens(self, frontend: int, request_ids: list[int], token_ids: list[int]) -> None:
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            self.push(frontend, request_id, token_id)

    def push_prompt_logprobs(self, frontend: int, request_id: int, entry: EventLogprobs) -> None:
        heard = self.open[frontend, request_id]
        ask, place = heard.ask, heard.num_scored
        if place >= len(ask.scores) or entry != _narrowed(ask.scores[place], ask.num_prompt_logprobs):
            raise Violation(f"{ask} is told {entry} of its prompt, and {place} of {ask.scores} before")
        heard.num_scored += 1
        self._world.covered["scored"] += 1

    def _judge_logprobs(self, heard: Open, logprobs: EventLogprobs | None) -> None:
        ask, width = heard.ask, heard.ask.sampling.num_logprobs
        if heard.num_scored != len(ask.scores):
            raise Violation(f"{ask} is told {heard.num_scored} of {ask.scores} of its prompt before its tokens")
        expected = None
        if width >= 0 and heard.next_index < len(ask.told):
            expected = _narrowed(ask.told[heard.next_index], width)
        if logprobs != expected:
            raise Violation(f"{ask} is told {logprobs} of token {heard.next_index}, not {expected}")
        self._world.covered["log probabilities"] += logprobs is not None

    def _judge_token(self, heard: Open, token_id: int, started: Started | None) -> None:
        ask, index = heard.ask, heard.next_index
        if index >= len(ask.expected) or ask.expected[index] != token_id:
            raise Violation(f"{ask} gets {token_id} as its token {index} of {ask.expected}")
        if heard.deadline_s is not None and heard.deadline_s <= self._world.now_s:
            raise Violation(f"{ask} gets a token after its deadline")
        if (started is None) != heard.is_started:
            raise Violation(f"{ask} starts twice or never")
        if started is not None:
            heard.is_started = True
            if started.cached_tokens > len(ask.prompt):
                raise Violation(f"{started.cached_tokens} of the {len(ask.prompt)} prompt tokens of {ask} were cached")
            self._world.covered["prefix found"] += started.cached_tokens > 0
        heard.next_index += 1

    def _judge_finish(self, heard: Open, key: tuple[int, int], finish: Finish, failure: Failure | None) -> None:
        ask, world = heard.ask, self._world
        world.covered[f"ended {finish.name}"] += 1
        match finish:
            case Finish.STOP | Finish.LENGTH:
                if finish is not ask.finish or heard.next_index != len(ask.expected):
                    raise Violation(f"{ask} ends {finish.name} after {heard.next_index} of {len(ask.expected)} tokens")
            case Finish.EXPIRED:
                if heard.deadline_s is None or heard.deadline_s > world.now_s:
                    raise Violation(f"{ask} expires too soon")
            case Finish.FAILED if failure is not None and failure.code == FailureCode.BAD_GRAMMAR:
                world.covered["ended by its grammar"] += 1
                if ask.finish is not Finish.FAILED or heard.next_index != len(ask.expected):
                    raise Violation(f"{ask} fails by its grammar after {heard.next_index} of {ask.expected}")
            case Finish.FAILED:
                world.judge.judge_failure(heard, key)
            case Finish.REJECTED if failure is not None:
                world.judge.judge_rejection(heard, FailureCode(failure.code))
            case _:
                raise Violation(f"{ask} ends {finish.name}")

    def flush(self) -> None:
        for epoch, outbox in list(self._outboxes.items()):
            frontend = self._world.frontends.get(epoch)
            if frontend is None:
                del self._outboxes[epoch]  # it died, and the backend is about to hear of it
            elif frontend.credit > 0:
                frontend.credit -= 1
                frontend.inbox.append(outbox)
                del self._outboxes[epoch]
            else:
                self._world.covered["credit spent"] += 1


def _narrowed(told: EventLogprobs, width: int) -> EventLogprobs:
    return msgspec.structs.replace(told, top_ids=told.top_ids[:width], top_logprobs=told.top_logprobs[:width])
