"""Reads from a recorded life when requests came in, and how they ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from penstock.commands.recorder.history import Life
from penstock.shm.link.events import Cancellation, FrontendDeath, LinkEvent, Submission
from penstock.shm.messages import Finish, Generate, Pool, Pooled, PromptHeader, Sampling, encode
from penstock.shm.recording.events import Arrived, BackendStarted, Cancelled, Ended, FrontendDied, Joined, Left, Started
from penstock.shm.recording.file import RecordingError
from penstock.tools.replay.made_up import NUM_STOP_IDS, MadeUpTokens

Request = tuple[int, int]
"""(frontend, request id)."""
_PLACEHOLDER = bytes(4)
_decoder: msgspec.msgpack.Decoder[Generate | Pool] = msgspec.msgpack.Decoder(Generate | Pool)


@dataclass(slots=True)
class _Told:
    """Facts about a life's requests, from its events."""

    arrived: dict[Request, Arrived] = field(default_factory=dict)
    sequence_of: dict[Request, int] = field(default_factory=dict)
    first_start: dict[int, Started] = field(default_factory=dict)
    """Sequence → the first event of its start."""
    final_tokens: dict[Request, int] = field(default_factory=dict)
    """Tokens of its sequence when it left."""
    ended: dict[Request, tuple[float, Ended]] = field(default_factory=dict)
    cancelled: set[Request] = field(default_factory=set)
    dead_frontends: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, life: Life) -> _Told:
        told = cls()
        for time_s, event in life.events:
            match event:
                case Arrived(frontend, request_id):
                    told.arrived[frontend, request_id] = event
                case Joined(frontend, request_id, sequence) if sequence >= 0:
                    told.sequence_of[frontend, request_id] = sequence
                case Started(sequence):
                    told.first_start.setdefault(sequence, event)
                    for frontend, request_id in event.requests:
                        told.sequence_of.setdefault((frontend, request_id), sequence)
                case Left(frontend, request_id, _, num_tokens):
                    told.final_tokens[frontend, request_id] = num_tokens
                case Ended(frontend, request_id):
                    told.ended[frontend, request_id] = time_s, event
                case Cancelled(frontend, request_id):
                    told.cancelled.add((frontend, request_id))
                case FrontendDied(frontend):
                    told.dead_frontends.add(frontend)
        return told


class Arrivals:
    """The requests that a replay sends, and the tokens that its device samples. Times are the recording's."""

    def __init__(self, life: Life, started: BackendStarted, *, from_prompts: bool) -> None:
        """from_prompts sends the recorded prompts; otherwise they are made up. Raises RecordingError."""
        self._life = life
        self._told = told = _Told.of(life)
        self._from_prompts = from_prompts
        self._max_tokens = started.max_context
        self.left_out: Counter[str] = Counter()
        """Why requests are not replayed → how many."""
        self.stop_ids: dict[tuple[int, int], int] = {}
        """(number of the sequence, position) → the stop token that was sampled there."""
        self.number_of: dict[Request, int] = {}
        """The recorded sequence of a request, numbered from 0, or a number of its own."""
        self.made_up = MadeUpTokens(started.page_size if started.num_pages else 0, started.vocab_size)
        self.pooled = frozenset(event.pooled for event in told.arrived.values() if event.pooled)
        self._num_stops: Counter[int] = Counter()
        self._number_sequences()
        self.events: list[tuple[float, LinkEvent]] = sorted(self._events(), key=lambda timed: timed[0])
        if not self.events:
            raise RecordingError("no request came in while it was recorded")
        num_before = len({request for request in told.sequence_of if request not in told.arrived})
        if num_before:
            self.left_out["came before the recording began"] = num_before

    def _number_sequences(self) -> None:
        told = self._told
        numbers = {sequence: number for number, sequence in enumerate(told.first_start)}
        final_tokens: Counter[int] = Counter()
        tenants: dict[int, str] = {}
        for request, sequence in told.sequence_of.items():
            final_tokens[sequence] = max(final_tokens[sequence], told.final_tokens.get(request, 1 << 62))
            if (arrived := told.arrived.get(request)) is not None:
                tenants.setdefault(sequence, arrived.tenant)
        for sequence, start in told.first_start.items():
            of_it = tenants.get(sequence, ""), start.prints, start.num_cached, start.num_tokens, final_tokens[sequence]
            self.made_up.add(numbers[sequence], *of_it)
        for request in told.arrived:
            sequence = told.sequence_of.get(request, -1)
            self.number_of[request] = numbers.get(sequence, len(numbers) + len(self.number_of))

    def _events(self) -> Iterator[tuple[float, LinkEvent]]:
        told, end_s = self._told, _end_s(self._life)
        for time_s, event in self._life.events:
            if not math.isfinite(time_s):
                raise RecordingError(f"an event has the time {time_s}")
            match event:
                case Arrived(frontend, request_id):
                    request = frontend, request_id
                    if (reason := self._why_left_out(request, event)) is not None:
                        self.left_out[reason] += 1
                        continue
                    yield time_s, Submission(frontend, self._message(request, event, time_s), b"")
                    ended_s, ended = told.ended.get(request, (end_s, None))
                    has_gone = request in told.cancelled or frontend in told.dead_frontends
                    if not has_gone and (ended is None or ended.finish in (Finish.FAILED, Finish.CANCELLED)):
                        yield ended_s, Cancellation(frontend, request_id)
                case Cancelled(frontend, request_id):
                    yield time_s, Cancellation(frontend, request_id)
                case FrontendDied(frontend):
                    yield time_s, FrontendDeath(frontend)

    def _why_left_out(self, request: Request, arrived: Arrived) -> str | None:
        _, ended = self._told.ended.get(request, (0.0, None))
        if ended is not None and ended.finish == Finish.REJECTED:
            return "were refused"
        if self._from_prompts and request not in self._life.prompts:
            return "have no recorded tokens"
        if self._from_prompts and arrived.adapter:
            return "use an adapter"
        if not arrived.pooled:
            return None
        if self._from_prompts:
            return "ask for vectors"
        is_cached = ended is not None and ended.finish == Finish.STOP and request not in self._told.sequence_of
        return "were answered from the cache of vectors" if is_cached else None

    def _message(self, request: Request, arrived: Arrived, time_s: float) -> PromptHeader:
        """Raises RecordingError for a value that no message has."""
        frontend, request_id = request
        if self._from_prompts:
            prompt = self._life.prompts[request]
            if len(prompt.tokens) % 4:
                raise RecordingError(f"the prompt of request {request_id} has {len(prompt.tokens)} bytes")
            return prompt.message
        if not 1 <= arrived.num_prompt_tokens <= arrived.num_tokens <= self._max_tokens:
            raise RecordingError(f"request {request_id} has {arrived.num_tokens} tokens; at most {self._max_tokens}")
        number = self.number_of[request]
        try:
            header: dict[str, Any] = {
                "request_id": request_id,
                "tokens": _PLACEHOLDER,
                "num_prompt_tokens": arrived.num_prompt_tokens,
                "tenant": bytes.fromhex(arrived.tenant),
                "weight": arrived.weight,
                "may_share": arrived.may_share,
                "priority": arrived.priority,
                "timeout_ms": arrived.timeout_ms,
                "admitted_ns": max(1, int(1e9 * time_s)) if arrived.is_resumed else 0,
                "adapter": arrived.adapter,
            }
            message: PromptHeader
            if arrived.pooled:
                message = Pool(pooled=Pooled("embed"), **header)
            else:
                sampling = Sampling(temperature=1.0, seed=number)  # requests of one recorded sequence share, no others
                stops = self._stops(request, number)
                message = Generate(max_tokens=arrived.max_tokens, sampling=sampling, stop_token_ids=stops, **header)
            _decoder.decode(encode(message))  # constructors check no bounds
        except (msgspec.MsgspecError, ValueError, OverflowError) as error:
            raise RecordingError(f"request {request_id} of frontend {frontend} cannot be replayed: {error}") from None
        return message

    def _stops(self, request: Request, number: int) -> tuple[int, ...]:
        """The stop token of the request, if it stopped. Others that share its sequence may stop at other tokens."""
        _, ended = self._told.ended.get(request, (0.0, None))
        final_tokens = self._told.final_tokens.get(request, 0)
        if ended is None or ended.finish != Finish.STOP or not final_tokens:
            return ()
        place = number, final_tokens - 1
        if place not in self.stop_ids:
            self.stop_ids[place] = self._num_stops[number] % NUM_STOP_IDS
            self._num_stops[number] += 1
        return (self.stop_ids[place],)

    def complete(self, event: LinkEvent) -> LinkEvent:
        """The event to send. Prompts are made when they are due, because all of them may not fit into memory."""
        if not isinstance(event, Submission):
            return event
        request = event.frontend, event.request_id
        if self._from_prompts:
            return replace(event, tokens=self._life.prompts[request].tokens)
        num_tokens = self._told.arrived[request].num_tokens
        return replace(event, tokens=self.made_up.prompt(self.number_of[request], num_tokens))


def _end_s(life: Life) -> float:
    """The time of the life's last record."""
    times_s = [time_s for time_s, _ in life.events[-1:]]
    times_s += [step.ended_s or step.planned_s for step in life.steps.values()]
    return max((time_s for time_s in times_s if math.isfinite(time_s)), default=0.0)
