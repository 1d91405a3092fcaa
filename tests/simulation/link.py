"""Simulated frontends and the link to the backend: what is sent, and when it arrives."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.shm.link.events import Cancellation, FrontendDeath, Submission
from penstock.shm.messages import (
    NO_TOKEN,
    AskQuote,
    EventLogprobs,
    Failure,
    FailureCode,
    Finish,
    Generate,
    Pool,
    Pooled,
    Progress,
    PromptHeader,
    Quote,
    QuoteTerms,
    Started,
    StreamRecord,
    VectorPart,
)
from penstock.tools.engine_rig import DroppingLink
from tests.simulation.pictures import PixelStore
from tests.simulation.violations import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.shm.link.events import LinkEvent
    from tests.simulation.workload import Ask
    from tests.simulation.world import World

    Message = tuple[int, int, Finish, Failure | None]


class LentPrompt:
    """Replaces a `Loan` of embeddings. The embedding of a token is the token; zeros after the request has ended."""

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
    """A frontend process with clients. It sends in order, reads at any time, and returns a credit per message read."""

    def __init__(self, epoch: int, credit: int) -> None:
        self.epoch = epoch
        self.asks: dict[int, Ask] = {}
        """Open requests by request id."""
        self.wire: deque[LinkEvent] = deque()
        """Sent, but not received by the backend yet."""
        self.pixels = PixelStore()
        self.inbox: deque[list[Message]] = deque()
        self.credit = credit

    def submit(self, ask: Ask, request_id: int, timeout_ms: int) -> None:
        self.asks[request_id] = ask
        prompt, pictures = self.pixels.present(ask.prompt, ask.spans, request_id)
        tokens = array("i", prompt + ask.got).tobytes()
        header: dict[str, Any] = {
            "request_id": request_id,
            "tokens": tokens,
            "num_prompt_tokens": len(ask.prompt),
            "salt": ask.salt,
            "tenant": ask.tenant,
            "weight": ask.weight,
            "may_share": ask.may_share,
            "priority": ask.priority,
            "timeout_ms": timeout_ms,
            "admitted_ns": ask.admitted_ns,
            "adapter": ask.adapter,
        }
        message: PromptHeader
        if ask.vector is not None:
            message = Pool(pooled=Pooled("embed", group=ask.group), **header)
        else:
            header |= {
                "max_tokens": ask.max_tokens,
                "sampling": ask.sampling,
                "stop_token_ids": ask.stop_ids,
                "constraints": ask.constraints,
                "num_prompt_logprobs": ask.num_prompt_logprobs,
                "pictures": pictures,
            }
            terms = QuoteTerms(num_choices=1 + ask.number % 3)
            message = (
                AskQuote(terms=terms, **header)
                if ask.is_question
                else Generate(refuse_late=terms if ask.refuses_late else None, **header)
            )
        if ask.is_embedded and not ask.got:
            lent: Any = LentPrompt(ask.prompt)
            self.wire.append(Submission(self.epoch, message, b"", embeddings=lent))
        else:
            self.wire.append(Submission(self.epoch, message, tokens, read_pixels=self.pixels.read))
        ask.num_lives += 1

    def cancel(self, request_id: int) -> None:
        self.wire.append(Cancellation(self.epoch, request_id))
        if (ask := self.asks.pop(request_id, None)) is not None:
            ask.ended = Finish.CANCELLED
            self.pixels.free(request_id)

    def read(self) -> None:
        """Read one message, if there is one."""
        if not self.inbox:
            return
        self.credit += 1
        for request_id, token_id, finish, _ in self.inbox.popleft():
            if (ask := self.asks.get(request_id)) is None:
                continue  # cancelled while the message was on its way
            if token_id >= 0:
                ask.got.append(token_id)
            if finish:
                ask.ended = finish
                del self.asks[request_id]
                self.pixels.free(request_id)


@dataclass(slots=True)
class Open:
    """A request that the backend has received, and that neither side has ended."""

    ask: Ask
    next_index: int
    """Index of the next token that is due."""
    deadline_s: float | None
    is_started: bool = False
    num_scored: int = 0
    """Prompt tokens whose log probabilities were received; all if none are requested."""
    is_judged: bool = False
    """The engine has taken it in; it can no longer be refused."""
    embeddings: Any = None
    """Its `LentPrompt`, if it has one."""
    quote: Quote | None = None

    def end_loan(self) -> None:
        if self.embeddings is not None:
            self.embeddings.end()


class SimulatedLink(DroppingLink):
    """The link of one backend process. It judges every event that the engine pushes."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._outboxes: dict[int, list[Message]] = {}
        self.open: dict[tuple[int, int], Open] = {}
        self.num_accepted = 0

    def receive(self) -> Iterator[LinkEvent]:
        """Events take effect here after the engine has handled them."""
        for event in super().receive():
            match event:
                case Submission():
                    yield from self._receive_submission(event)
                case Cancellation(epoch, request_id):
                    opened = self.open.get((epoch, request_id))
                    self._world.judge.note_cancel(opened, epoch, request_id)
                    if opened is not None:
                        opened.end_loan()
                    yield event
                    self.open.pop((epoch, request_id), None)
                case FrontendDeath(epoch):
                    for (owner, _), opened in self.open.items():
                        if owner == epoch:
                            opened.end_loan()
                    yield event
                    self.open = {key: opened for key, opened in self.open.items() if key[0] != epoch}
                    self._outboxes.pop(epoch, None)

    def _receive_submission(self, event: Submission[Any]) -> Iterator[LinkEvent]:
        world, message = self._world, event.message
        key = event.frontend, event.request_id
        ask = world.ask_of(*key)
        deadline_s = world.now_s + message.timeout_ms / 1000 if message.timeout_ms else None
        num_given_tokens = len(event.tokens) // 4 - message.num_prompt_tokens if event.tokens else 0
        opened = Open(ask, num_given_tokens, deadline_s, embeddings=event.embeddings)
        world.covered["embedded"] += event.embeddings is not None
        if opened.next_index or not ask.scores:
            opened.num_scored = len(ask.scores)
        self.open[key] = opened
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
        progress: Progress | None = None,
    ) -> None:
        opened = self.open.get((frontend, request_id))
        if opened is None:
            raise Violation(f"{frontend}/{request_id} receives {token_id} {finish.name} and is not open")
        if token_id >= 0:
            self._judge_logprobs(opened, logprobs)
            self._judge_token(opened, token_id, started)
        elif finish is Finish.NONE:
            raise Violation(f"{opened.ask} receives {progress or 'an empty event'}")
        if finish:
            self._judge_finish(opened, (frontend, request_id), finish, failure)
            self.open.pop((frontend, request_id)).end_loan()
        self._outboxes.setdefault(frontend, []).append((request_id, token_id, finish, failure))
        if self._world.log is not None:
            self._world.log(f"  → {opened.ask} {token_id} {finish.name if finish else ''}")

    def push_vectors(
        self, frontend: int, request_id: int, parts: Iterable[VectorPart], started: Started | None = None
    ) -> None:
        opened = self.open.get((frontend, request_id))
        if opened is None:
            raise Violation(f"{frontend}/{request_id} receives a vector and is not open")
        vector = array("f", b"".join(part.values for part in parts)).tolist()
        if vector != opened.ask.vector or started is None:
            raise Violation(f"{opened.ask} receives {vector}, not {opened.ask.vector}")
        self._world.covered["vectors"] += 1
        self._world.covered["vectors shared"] += started.is_coalesced
        self._world.covered["vectors kept"] += started.cached_tokens == len(opened.ask.prompt)
        self._world.covered["vectors computed again"] += opened.ask.num_lives > 1
        self.push(frontend, request_id, NO_TOKEN, Finish.STOP)

    def push_answer(self, frontend: int, answer: Quote | StreamRecord) -> None:
        if not isinstance(answer, Quote):
            raise Violation("nobody asks about streams")
        self.open[frontend, answer.request_id].quote = answer
        known = (answer.first_token_s, answer.finish_s, answer.latest_finish_s)
        times = [0.0, *(time_s for time_s in known if time_s is not None)]
        if times != sorted(times):
            raise Violation(f"a quote contradicts itself: {answer}")
        self._world.covered["quoted"] += len(times) > 1

    def announce_room(self, frontend: int) -> None:
        self._world.covered["room announced"] += 1

    def push_prompt_logprobs(self, frontend: int, request_id: int, entry: EventLogprobs) -> None:
        opened = self.open[frontend, request_id]
        ask, place = opened.ask, opened.num_scored
        if place >= len(ask.scores) or entry != _narrowed(ask.scores[place], ask.num_prompt_logprobs):
            raise Violation(f"{ask} receives {entry} for its prompt after {place} of {ask.scores}")
        opened.num_scored += 1
        self._world.covered["scored"] += 1

    def _judge_logprobs(self, opened: Open, logprobs: EventLogprobs | None) -> None:
        ask, width = opened.ask, opened.ask.sampling.num_logprobs
        if opened.num_scored != len(ask.scores):
            raise Violation(f"{ask} receives {opened.num_scored} of {ask.scores} for its prompt before its tokens")
        expected = None
        if width >= 0 and opened.next_index < len(ask.logprobs):
            expected = _narrowed(ask.logprobs[opened.next_index], width)
        if logprobs != expected:
            raise Violation(f"{ask} receives {logprobs} for token {opened.next_index}, not {expected}")
        self._world.covered["log probabilities"] += logprobs is not None

    def _judge_token(self, opened: Open, token_id: int, started: Started | None) -> None:
        ask, index = opened.ask, opened.next_index
        if index >= len(ask.expected) or ask.expected[index] != token_id:
            raise Violation(f"{ask} gets {token_id} as its token {index} of {ask.expected}")
        if opened.deadline_s is not None and opened.deadline_s <= self._world.now_s:
            raise Violation(f"{ask} gets a token after its deadline")
        if (started is None) != opened.is_started:
            raise Violation(f"{ask} starts twice or never")
        if started is not None:
            opened.is_started = True
            if started.cached_tokens > len(ask.prompt):
                raise Violation(f"{started.cached_tokens} of the {len(ask.prompt)} prompt tokens of {ask} were cached")
            self._world.covered["prefix found"] += started.cached_tokens > 0
        opened.next_index += 1

    def _judge_finish(self, opened: Open, key: tuple[int, int], finish: Finish, failure: Failure | None) -> None:
        ask, world = opened.ask, self._world
        world.covered[f"ended {finish.name}"] += 1
        match finish:
            case Finish.STOP | Finish.LENGTH:
                if finish is not ask.finish or opened.next_index != len(ask.expected):
                    raise Violation(f"{ask} ends {finish.name} after {opened.next_index} of {len(ask.expected)} tokens")
            case Finish.EXPIRED:
                if opened.deadline_s is None or opened.deadline_s > world.now_s:
                    raise Violation(f"{ask} expires too soon")
            case Finish.QUOTED:
                if not ask.is_question or opened.quote is None:
                    raise Violation(f"{ask} ends with the quote {opened.quote}")
            case Finish.FAILED if failure is not None and failure.code == FailureCode.BAD_GRAMMAR:
                world.covered["ended by its grammar"] += 1
                if ask.finish is not Finish.FAILED or opened.next_index != len(ask.expected):
                    raise Violation(f"{ask} fails by its grammar after {opened.next_index} of {ask.expected}")
            case Finish.FAILED if failure is not None and failure.code == FailureCode.BAD_PICTURE:
                if ask.ended is not Finish.CANCELLED or not ask.spans:
                    raise Violation(f"{ask} fails for pixels that are not gone: {failure.text}")
            case Finish.FAILED:
                world.judge.judge_failure(opened, key)
            case Finish.REJECTED if failure is not None:
                world.judge.judge_rejection(opened, FailureCode(failure.code))
            case _:
                raise Violation(f"{ask} ends {finish.name}")

    def flush(self) -> None:
        for epoch, outbox in list(self._outboxes.items()):
            frontend = self._world.frontends.get(epoch)
            if frontend is None:
                del self._outboxes[epoch]  # it died, and the backend will hear of it
            elif frontend.credit > 0:
                frontend.credit -= 1
                frontend.inbox.append(outbox)
                del self._outboxes[epoch]
            else:
                self._world.covered["credit spent"] += 1


def _narrowed(entry: EventLogprobs, width: int) -> EventLogprobs:
    return msgspec.structs.replace(entry, top_ids=entry.top_ids[:width], top_logprobs=entry.top_logprobs[:width])
