"""The real engine with the fake pass, a scripted link, and an executor that runs a step only when the test says so."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backend.engine.requests.limits import EngineLimits
from penstock.backend.engine.steps.draft_desk import DraftDesk
from penstock.backend.engine.steps.draft_model import DraftModel, HeadModel, num_spare_pages
from penstock.backend.engine.steps.launched_step import launch_step
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.passes.decoder.guess_pass import GuessPass
from penstock.backend.passes.fake import FakePass
from penstock.backend.start.paging import create_cache
from penstock.shm.link.events import Cancellation, Submission
from penstock.shm.messages import (
    NO_TOKEN,
    Adapter,
    AskQuote,
    EventLogprobs,
    Failure,
    Finish,
    Generate,
    Pool,
    Pooled,
    PooledKind,
    Progress,
    Quote,
    Sampling,
    Started,
    StreamRecord,
    VectorPart,
)
from penstock.tools.engine_rig import DroppingLink, EngineRig, RigSizes, ThreadlessExecutor
from tests.fake_passes import next_token

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from penstock.backend.engine.requests.vector_delivery import VectorCache
    from penstock.backend.engine.steps.launched_step import PageSaves
    from penstock.backend.forward_pass import PassSpec, StepBatch
    from penstock.backend.kv_cache.page_store import PageStore
    from penstock.backend.scheduling.drafting import Drafting
    from penstock.backend.scheduling.step_plan import Plan
    from penstock.backend.structured_output.grammar_queue import GrammarQueue
    from penstock.backend.structured_output.late_masks import LateMasks
    from penstock.tools.engine_rig import Launch

GREEDY = Sampling(temperature=0.0)


def packed(token_ids: list[int]) -> bytes:
    return array("i", token_ids).tobytes()


def expected_tokens(
    prompt: list[int],
    count: int,
    vocab_size: int,
    stop_ids: tuple[int, ...] = (),
    kv_windows: tuple[int | None, ...] = (None,),
) -> list[int]:
    """The fake pass's greedy tokens by its definition, up to a stop id or count tokens."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(tokens, vocab_size, kv_windows))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class Received:
    """All that a frontend received for one request."""

    token_ids: list[int] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    started: Started | None = None
    failure: Failure | None = None
    logprobs: list[EventLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[EventLogprobs] = field(default_factory=list)
    num_preemptions: int = 0
    parts: list[VectorPart] = field(default_factory=list)
    quote: Quote | None = None
    record: bytes = b""
    progress: list[Progress] = field(default_factory=list)

    @property
    def values(self) -> NDArray[np.float32]:
        """Return a vector that is complete."""
        assert self.finishes == [Finish.STOP], (self.finishes, self.failure)
        values = np.frombuffer(b"".join(part.values for part in self.parts), np.float32)
        assert {part.num_values for part in self.parts} == {len(values)}
        return values


class ScriptedLink(DroppingLink):
    """The test adds arrivals and reads what was pushed."""

    def __init__(self) -> None:
        super().__init__()
        self.received: dict[tuple[int, int], Received] = defaultdict(Received)
        self.dead: set[int] = set()
        self.announced: list[int] = []
        """Frontends that learned that there is room."""
        self.adapters: tuple[Adapter, ...] | None = None
        """As frontends learned them; None before the first change."""

    def announce_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        self.adapters = adapters

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
        assert frontend not in self.dead
        received = self.received[frontend, request_id]
        assert not received.finishes, "an event after the end"
        if token_id >= 0:
            received.token_ids.append(token_id)
            received.logprobs.append(logprobs)
        if finish is not Finish.NONE:
            received.finishes.append(finish)
        received.started = received.started or started
        received.failure = failure
        if progress is not None:
            assert token_id == NO_TOKEN
            assert not received.token_ids, "progress after the first token"
            received.progress.append(progress)

    def push_answer(self, frontend: int, answer: Quote | StreamRecord) -> None:
        received = self.received[frontend, answer.request_id]
        assert not received.finishes, "an answer after the end"
        if isinstance(answer, Quote):
            received.quote = answer
        else:
            received.record = answer.data

    def push_prompt_logprobs(self, frontend: int, request_id: int, entry: EventLogprobs) -> None:
        received = self.received[frontend, request_id]
        assert not received.token_ids, "log probabilities of a prompt after the first token"
        received.prompt_logprobs.append(entry)

    def push_vectors(
        self, frontend: int, request_id: int, parts: Iterable[VectorPart], started: Started | None = None
    ) -> None:
        received = self.received[frontend, request_id]
        received.parts += parts
        self.push(frontend, request_id, NO_TOKEN, Finish.STOP, started)

    def announce_room(self, frontend: int) -> None:
        self.announced.append(frontend)

    def note_preemption(self, frontend: int, request_id: int) -> None:
        self.received[frontend, request_id].num_preemptions += 1


class JudgedExecutor(ThreadlessExecutor):
    """`run_one` runs one step, on the caller's thread. Remembers the batches that were launched."""

    def __init__(self, launch: Launch, capacity: int) -> None:
        super().__init__(capacity)
        self._launch = launch
        self.batches: list[StepBatch] = []
        self.num_rows_run = 0
        self.step_s = 0.0
        """Reported as the duration of each step; the caller sets it."""
        self.ran_s = 0.0
        """How long the running step has run; the caller sets it."""

    @property
    def num_planned(self) -> int:
        return len(self._plans)

    def running_s(self) -> float:
        return self.ran_s

    def run_one(self) -> bool:
        """False if no plan waits."""
        if not self._plans:
            return False
        result = self._launch(*self._plans.popleft()).finish()
        self.num_rows_run += len(result.plan)
        self._results.append(replace(result, step_s=self.step_s))
        return True

    def launch(self, plan: Plan, batch: StepBatch, saves: PageSaves) -> None:
        assert len(set(plan.sequences)) == len(plan), "a sequence has two rows in one step"
        super().launch(plan, batch, saves)
        self.batches.append(batch)


def _served(forward_pass: Any) -> dict[str, Any]:
    spec = forward_pass.spec
    tower = forward_pass.picture_tower if spec.max_picture_bytes else None
    return {"pooled": spec.pooled, "generates": spec.generates, "adapters": _adapters(spec), "tower": tower}


def _adapters(spec: PassSpec) -> dict[str, int]:
    return {f"adapter-{index}": index for index in range(len(spec.adapter_ranks))}


class Bench(EngineRig):
    """One engine, turned by hand. vocab_size is small, so that stop ids occur."""

    scheduler: Any

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_running: int = 8,
        max_batch_tokens: int = 16,
        capacity: int = 1,
        max_context: int | None = None,
        max_waiting: int = 1000,
        vocab_size: int = 97,
        priority_step_s: float = 0.0,
        max_park_steps: int = 64,
        num_host_pages: int = 0,
        num_checkpoints: int = 4,
        store: PageStore | None = None,
        forward_pass: Any = None,
        grammar_queue: GrammarQueue | None = None,
        link: ScriptedLink | None = None,
        late_masks: LateMasks | None = None,
        vector_cache: VectorCache | None = None,
        drafting: Drafting | None = None,
        draft_pass: Any = None,
        min_chance: float = 0.3,
        make_pictures: Any = lambda _, __: None,
    ) -> None:
        self.vocab_size, self.page_size = vocab_size, page_size
        self.forward_pass = forward_pass or FakePass(vocab_size, max_running, 8 * page_size * num_host_pages)
        spec = self.forward_pass.spec
        sizes = RigSizes(
            num_pages=num_pages if spec.kv_bytes_per_token else 0,
            page_size_tokens=page_size,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            num_plans_ahead=capacity,
            max_park_steps=max_park_steps,
            num_checkpoints=num_checkpoints * spec.copies_states if spec.state_bytes_per_sequence else None,
            checkpoint_spacing=2 * page_size,
            state_store=None if store is None else store.states,
            kv_windows=spec.kv_windows,
            drafting=drafting,
            has_picture_axes=spec.has_picture_axes,
        )
        if sizes.num_pages:
            create_cache(self.forward_pass, num_pages, page_size, "fp32", num_checkpoints)
        context = sizes.groups.longest_sequence(num_pages, max_context or 1 << 16)
        self.executor = JudgedExecutor(partial(launch_step, self.forward_pass, late_masks=late_masks), capacity)
        self.link, self.now_s = link or ScriptedLink(), 0.0
        self.pool = PagePool(num_pages, num_host_pages, store=store, texts=None if drafting is None else drafting.texts)
        served = _served(self.forward_pass)
        super().__init__(
            self.link, self.executor, sizes,
            EngineLimits(vocab_size, context, max_waiting, priority_step_s, **served), self.clock,
            pool=self.pool,
            grammar_queue=grammar_queue,
            vector_cache=vector_cache,
            make_pictures=make_pictures,
        )  # fmt: skip
        if draft_pass is not None:
            self.engine.draft_desk = self._make_draft_desk(drafting, draft_pass, min_chance)

    def _make_draft_desk(self, drafting: Any, draft_pass: Any, min_chance: float) -> DraftDesk:
        if isinstance(draft_pass, GuessPass):
            head: Any = HeadModel(draft_pass, self.pool.num_pages, self.page_size, 16, min_chance)
            return DraftDesk(head, self.executor, drafting, self.scheduler.next_decodes, self.vocab_size)
        num_pages = self.pool.num_pages + num_spare_pages(self.page_size)
        draft_pass.create_cache(num_pages, self.page_size, "fp32")
        model = DraftModel(draft_pass, self.pool.num_pages, self.page_size, 16, min_chance)
        return DraftDesk(model, self.executor, drafting, self.scheduler.next_decodes, self.vocab_size)

    def clock(self) -> float:
        return self.now_s

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        frontend: int = 1,
        request_id: int = 0,
        sampling: Sampling = GREEDY,
        stop_ids: tuple[int, ...] = (),
        num_prompt_tokens: int | None = None,
        kind: type[Generate | AskQuote] = Generate,
        **options: Any,
    ) -> None:
        tokens = packed(prompt)
        num_prompt_tokens = num_prompt_tokens or len(prompt)
        message = kind(
            request_id=request_id,
            tokens=tokens,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_token_ids=stop_ids,
            **options,
        )
        self.link.arrivals.append(Submission(frontend, message, tokens))

    def submit_pooled(
        self,
        tokens: list[int],
        kind: PooledKind = "embed",
        second_start: int = 0,
        *,
        request_id: int = 0,
        num_dimensions: int = 0,
        normalize: bool = False,
        group: int = 0,
        **options: Any,
    ) -> None:
        """Submit a pooled request."""
        pooled = Pooled(kind, second_start, num_dimensions, normalize, group)
        frontend, options = options.pop("frontend", 1), {"may_share": True, "num_prompt_tokens": len(tokens)} | options
        message = Pool(request_id=request_id, tokens=packed(tokens), pooled=pooled, **options)
        self.link.arrivals.append(Submission(frontend, message, packed(tokens)))

    def cancel(self, request_id: int = 0, frontend: int = 1) -> None:
        self.link.arrivals.append(Cancellation(frontend, request_id))

    def received(self, request_id: int = 0, frontend: int = 1) -> Received:
        return self.link.received[frontend, request_id]

    def turn(self) -> None:
        """Finish one step on the device, then turn the loop."""
        self.executor.run_one()
        self.engine.turn()
        self.engine.check_integrity()

    @property
    def is_idle(self) -> bool:
        """Nothing is open or in flight."""
        return not self.link.arrivals and not self.requests.table.num_open and not self.executor.is_busy

    def run_dry(self, max_turns: int = 5000) -> int:
        """Turn until nothing is open or in flight. Returns the number of turns."""
        for turn in range(max_turns):
            if self.is_idle:
                return turn
            self.turn()
        raise AssertionError(f"{self.requests.table.num_open} requests still open after {max_turns} turns")

    def close(self) -> None:
        self.board.close()
