"""Many backends with the real loop, scheduler and prefix cache, on simulated devices and one simulated clock.

A step of a device lasts STEP_S, and TOKEN_S longer for each of its tokens. Loops and wires take no time: `penstock
bench scheduling` measures the cost of a backend's loop.

A backend may die: its streams continue at others with the tokens that they have, and it comes back with an empty cache.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from penstock.backend.engine.batch_builder import BatchBuilder
from penstock.backend.engine.limits import EngineLimits
from penstock.backend.engine.loop import Engine
from penstock.backend.engine.requests import Requests
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.shm.link.events import Submission
from penstock.shm.memory.board import BackendBoard
from penstock.shm.memory.page_digest import PageDigestWriter, digest_bytes
from penstock.shm.memory.prefix_table import Owner
from penstock.shm.messages import Generate, Sampling
from penstock.tools.bench.components.simulated_device import VOCAB_SIZE, RecordingLink, SimulatedDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.shm.memory.page_digest import PageDigest
    from penstock.tools.bench.replicas.fleet_routing import Policy

TOKEN_S = 20e-6
"""Time of a prompt's token: prefill of 50,000 tokens a second, like a large GPU's for a model of 8 billion
parameters."""
PAGE_SIZE_TOKENS = 32
NUM_PAGES = 1024
"""32,768 tokens: room for the sequences that run and for about forty prefixes."""
MAX_RUNNING = 64
_MAX_BATCH_TOKENS = 2048
_CONTEXT_TOKENS = 1024
_MIN_WAIT_S = 1e-6
_OUTAGE_S = 0.5


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in groups with a common prefix. The groups' sizes follow Zipf's law, and arrivals a Poisson process."""

    requests_per_backend: int
    rate_per_backend_s: float
    groups_per_backend: int
    prefix_tokens: int = 512
    own_tokens: int = 64
    output_tokens: int = 16

    def draw(self, num_backends: int, seed: int) -> list[tuple[float, array[int]]]:
        """Draw time and prompt of each request, in order of time."""
        draw = random.Random(seed)  # noqa: S311 - a load, not a secret
        num_groups, num_requests = (
            each * num_backends for each in (self.groups_per_backend, self.requests_per_backend)
        )
        weights = list(itertools.accumulate(1 / rank for rank in range(1, num_groups + 1)))
        prefixes = [_tokens(draw, self.prefix_tokens) for _ in range(num_groups)]
        now_s, drawn = 0.0, []
        for group in draw.choices(range(num_groups), cum_weights=weights, k=num_requests):
            now_s += draw.expovariate(self.rate_per_backend_s * num_backends)
            drawn.append((now_s, prefixes[group] + _tokens(draw, self.own_tokens)))
        return drawn


def _tokens(draw: random.Random, count: int) -> array[int]:
    return array("i", draw.choices(range(1, VOCAB_SIZE), k=count))


@dataclass(slots=True)
class _Stream:
    """One request, as its client observes it. tokens are the prompt and what has been generated."""

    arrived_s: float
    tokens: array[int]
    num_prompt_tokens: int
    first_s: float | None = None
    has_ended: bool = False


class _Backend:
    """A `Place`. Each life has a new loop and an empty cache."""

    def __init__(self, index: int, clock: Callable[[], float]) -> None:
        self.index = index
        self.computed_tokens, self.prompt_tokens, self.cached_tokens, self.busy_s = 0, 0, 0, 0.0
        """Of the lives that have ended."""
        self.open: dict[int, _Stream] = {}
        self.is_alive = True
        self._clock = clock
        self._generation = 0
        self._begin()

    def _begin(self) -> None:
        self._generation += 1
        self.link, self.device = RecordingLink(), SimulatedDevice(1, TOKEN_S)
        self.board = BackendBoard.private(digest_bytes(NUM_PAGES))
        self._digest_writer = PageDigestWriter(self.board.behind, PAGE_SIZE_TOKENS)
        link, device = cast("Any", self.link), cast("Any", self.device)
        pool = PagePool(NUM_PAGES, observers=[self._digest_writer])
        scheduler = Scheduler(pool, PAGE_SIZE_TOKENS, MAX_RUNNING, _MAX_BATCH_TOKENS)
        limits = EngineLimits(VOCAB_SIZE, _CONTEXT_TOKENS, max_waiting=1 << 16)
        requests = Requests.make(link, scheduler, self.board, limits, self._clock)
        builder = BatchBuilder(MAX_RUNNING, _CONTEXT_TOKENS // PAGE_SIZE_TOKENS)
        self.engine = Engine(link, device, scheduler, builder, requests, self.board, self._clock)

    @property
    def load(self) -> int:
        return len(self.open)

    @property
    def digest(self) -> PageDigest | None:
        return self.board.digest

    @property
    def owner(self) -> Owner:
        return Owner(self.index, self._generation & 0xFF)

    def has_adapter(self, adapter_id: str) -> bool:
        return not adapter_id

    def end_life(self) -> None:
        """Count what it has computed, and drop all its state."""
        self.computed_tokens += self.board.computed_tokens
        self.prompt_tokens += self.board.prompt_tokens
        self.cached_tokens += self.board.cached_tokens
        self.busy_s += self.device.busy_s
        self.link.close()
        self._digest_writer.close()
        self.board.close()
        self.is_alive = False

    def restart(self) -> None:
        self._begin()
        self.is_alive = True

    def turn(self, now_s: float) -> float | None:
        """Run one turn of the loop. Return when the next is due; None if nothing runs."""
        self.device.advance(now_s)
        self.engine.turn()
        self.device.take_plans(now_s)
        due_s = self.device.next_due_s(now_s)
        if due_s is not None and (plan_due_s := self.engine.plan_due_s) is not None:
            due_s = min(due_s, now_s + max(plan_due_s, _MIN_WAIT_S))
        return due_s


@dataclass(frozen=True, slots=True)
class FleetResult:
    """One policy under one load. Shares are from 0 to 1."""

    backends: int
    policy: str
    requests: int
    hit_rate: float
    """Prompt tokens that were found in a cache."""
    best_hit_rate: float
    """The hit rate if each prefix were computed once in the whole fleet."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    in_time: float
    """Requests whose first token came within IN_TIME_S."""
    busiest_over_mean: float
    """Device time of the busiest backend, over the mean."""
    moved: int
    """Streams that continued elsewhere because their backend died."""
    routing_us: float
    """CPU time of one choice."""


IN_TIME_S = 0.2


class Fleet:
    """Runs one load."""

    def __init__(self, num_backends: int, policy: Policy, traffic: Traffic, *, num_deaths: int = 0) -> None:
        """num_deaths backends die at once, when half of the requests have come."""
        self._policy, self._traffic, self._num_deaths = policy, traffic, num_deaths
        self._now_s = 0.0
        self._backends = [_Backend(index, lambda: self._now_s) for index in range(num_backends)]
        self._streams: list[_Stream] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._next_turn_s: dict[int, float] = {}
        """Backend → time of the turn that counts; turns planned for another time are void."""
        self._order = itertools.count()
        self._routing_ns = self._num_routed = self._num_moved = 0

    def run(self, name: str, seed: int) -> FleetResult:
        num_backends = len(self._backends)
        drawn = self._traffic.draw(num_backends, seed)
        arrivals = iter(drawn)
        self._await(arrivals)
        if self._num_deaths:
            dying = random.Random(seed).sample(self._backends, self._num_deaths)  # noqa: S311 - as above
            self._at(drawn[len(drawn) // 2][0], lambda: self._kill(dying))
        while self._due:
            self._now_s, _, action = heapq.heappop(self._due)
            action()
        if any(stream.first_s is None or not stream.has_ended for stream in self._streams):
            raise AssertionError("a stream was lost")
        return self._result(name, [prompt for _, prompt in drawn])

    def close(self) -> None:
        for backend in self._backends:
            if backend.is_alive:
                backend.end_life()

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), action))

    def _await(self, arrivals: Iterator[tuple[float, array[int]]]) -> None:
        """Schedule the next arrival; only that one is in the heap."""
        if (arrival := next(arrivals, None)) is None:
            return
        at_s, prompt = arrival

        def arrive() -> None:
            stream = _Stream(at_s, prompt[:], len(prompt))
            self._streams.append(stream)
            self._submit(len(self._streams) - 1)
            self._await(arrivals)

        self._at(at_s, arrive)

    def _submit(self, request_id: int) -> None:
        stream = self._streams[request_id]
        packed = stream.tokens.tobytes()
        message = Generate(
            request_id=request_id,
            tokens=packed,
            num_prompt_tokens=stream.num_prompt_tokens,
            max_tokens=self._traffic.output_tokens,
            sampling=Sampling(temperature=1.0),
        )
        alive = [backend for backend in self._backends if backend.is_alive]
        started_ns = time.thread_time_ns()
        chosen = self._policy.place(alive, message, stream.tokens)
        self._routing_ns += time.thread_time_ns() - started_ns
        self._num_routed += 1
        backend = self._backends[chosen.index]
        backend.open[request_id] = stream
        backend.link.arrivals.append(Submission(request_id % 4, message, packed))
        self._turn_at(backend, self._now_s)

    def _turn_at(self, backend: _Backend, at_s: float) -> None:
        if self._next_turn_s.get(backend.index, at_s + 1.0) > at_s:
            self._next_turn_s[backend.index] = at_s
            self._at(at_s, lambda: self._turn(backend, at_s))

    def _turn(self, backend: _Backend, at_s: float) -> None:
        if self._next_turn_s.get(backend.index) != at_s:
            return
        del self._next_turn_s[backend.index]
        due_s = backend.turn(self._now_s)
        pushed, backend.link.pushed = backend.link.pushed, []
        for request_id, has_token, is_end in pushed:
            stream = backend.open[request_id]
            if has_token:
                stream.tokens.append(1)
                stream.first_s = self._now_s if stream.first_s is None else stream.first_s
            if is_end:
                stream.has_ended = True
                del backend.open[request_id]
        if due_s is not None:
            self._turn_at(backend, due_s)

    def _kill(self, backends: Sequence[_Backend]) -> None:
        """Kill the backends at once; then their streams look for other places."""
        for backend in backends:
            backend.end_life()
            self._next_turn_s.pop(backend.index, None)
        for backend in backends:
            moving, backend.open = list(backend.open), {}
            self._num_moved += len(moving)
            for request_id in moving:
                self._submit(request_id)
        for backend in backends:
            self._at(self._now_s + _OUTAGE_S, backend.restart)

    def _result(self, name: str, prompts: Sequence[array[int]]) -> FleetResult:
        self.close()
        backends = self._backends
        prefix_tokens = self._traffic.prefix_tokens
        distinct = len({prompt[:prefix_tokens].tobytes() for prompt in prompts})
        num_prompt_tokens = sum(map(len, prompts))
        ttfts_s = sorted(cast("float", stream.first_s) - stream.arrived_s for stream in self._streams)
        busy_s = [backend.busy_s for backend in backends]
        return FleetResult(
            backends=len(backends),
            policy=name,
            requests=len(prompts),
            hit_rate=sum(backend.cached_tokens for backend in backends)
            / sum(backend.prompt_tokens for backend in backends),
            best_hit_rate=prefix_tokens * (len(prompts) - distinct) / num_prompt_tokens,
            ttft_p50_ms=1e3 * ttfts_s[len(ttfts_s) // 2],
            ttft_p99_ms=1e3 * ttfts_s[len(ttfts_s) * 99 // 100],
            in_time=sum(ttft_s <= IN_TIME_S for ttft_s in ttfts_s) / len(ttfts_s),
            busiest_over_mean=max(busy_s) * len(busy_s) / sum(busy_s),
            moved=self._num_moved,
            routing_us=self._routing_ns / 1e3 / self._num_routed,
        )
