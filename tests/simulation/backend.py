"""One life of the backend: the real engine between a simulated link and a simulated device."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.backend.engine.loop import Engine
from penstock.backend.engine.quoting.history import QuoteErrors
from penstock.backend.engine.quoting.quote_queue import QuoteQueue
from penstock.backend.engine.quoting.quoter import Quoter
from penstock.backend.engine.requests.adapters import AdapterSet, AdapterTable
from penstock.backend.engine.requests.cancellation import Canceller
from penstock.backend.engine.requests.handling import RequestHandling
from penstock.backend.engine.requests.limits import EngineLimits
from penstock.backend.engine.requests.request_table import RequestTable
from penstock.backend.engine.requests.stream_table import StreamTable
from penstock.backend.engine.requests.vector_delivery import VectorCache, VectorDelivery
from penstock.backend.engine.steps.step_timing import StepTiming
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.kv_cache.state_checkpoints import StateCheckpoints
from penstock.backend.scheduling.restart_grace import RestartGrace
from penstock.backend.sequences.sequence import NEW
from penstock.backend.structured_output.grammar_cache import GrammarCache
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.shm.memory.board import BackendBoard
from tests.simulation.chain_pass import PassSizes
from tests.simulation.device import SimulatedExecutor
from tests.simulation.drafting import make_desk, make_drafting
from tests.simulation.faults import FaultyBuilder, FaultyDelivery, FaultyIntake, FaultyScheduler
from tests.simulation.link import SimulatedLink
from tests.simulation.pictures import JudgedDesk, SimulatedTower
from tests.simulation.rules import SimulatedPool
from tests.simulation.violations import Violation

if TYPE_CHECKING:
    from penstock.backend.sequences.sequence import Sequence
    from tests.simulation.workload import Setup
    from tests.simulation.world import World


class JudgedGrace(RestartGrace):
    """Judges that requests which came back together, and may share their tokens, have one sequence."""

    def __init__(self, world: World) -> None:
        start_s, quiet_s, longest_s = world.setup.grace_s
        super().__init__(world.clock, start_s=start_s, quiet_s=quiet_s, longest_s=longest_s)
        self._world = world

    def take_due(self) -> list[Sequence]:
        due = super().take_due()
        coalescer = self._world.backend.requests.table.coalescer
        resumed = [sequence for sequence in due if sequence.admitted_ns != NEW]
        keys = [coalescer._keys[sequence] for sequence in resumed if sequence in coalescer._keys]
        num_members = [len(sequence.subscribers) for sequence in resumed]
        self._world.covered["groups resumed"] += sum(count > 1 for count in num_members)
        if len(set(keys)) != len(keys):
            raise Violation("a group comes back as several sequences")
        return due


def _loaded_adapters(world: World) -> tuple[str, ...]:
    """All in any order, or all but one."""
    adapters = tuple(world.more_rng.sample(world.setup.adapters, len(world.setup.adapters)))
    return adapters[1:] if adapters and world.more_rng.random() < 0.3 else adapters


def _pass_sizes(setup: Setup, adapters: tuple[str, ...]) -> PassSizes:
    return PassSizes(
        setup.num_pages,
        setup.num_host_pages,
        setup.page_size,
        setup.max_running,
        setup.max_batch_tokens,
        runs_ahead=setup.runs_ahead,
        num_checkpoints=setup.num_checkpoints,
        adapters=adapters,
    )


def _checkpoints(setup: Setup) -> StateCheckpoints | None:
    """They may be at neighbouring pages."""
    if setup.num_checkpoints is None:
        return None
    return StateCheckpoints(PagePool(setup.num_checkpoints), setup.page_size, setup.page_size)


class Backend:
    """One backend process from start to death."""

    def __init__(self, world: World) -> None:
        setup = world.setup
        self.adapters = _loaded_adapters(world)
        pass_sizes = _pass_sizes(setup, self.adapters)
        self.forward_pass, drafting = setup.model.new_pass(pass_sizes), make_drafting(world)
        texts = None if drafting is None else drafting.texts
        self.link, self.pool = SimulatedLink(world), PagePool(setup.num_pages, setup.num_host_pages, texts=texts)
        self.executor = SimulatedExecutor(world, self.forward_pass, setup.capacity, setup.page_size)
        self.board = BackendBoard.create()
        self.scheduler = FaultyScheduler(
            world,
            self.pool,
            setup.page_size,
            setup.max_running,
            setup.max_batch_tokens,
            setup.max_park_steps,
            setup.num_plans_ahead,
            states=_checkpoints(setup),
            kv_windows=self.forward_pass.spec.kv_windows,
            drafting=drafting,
        )
        sizes = (setup.model.vocab_size, setup.context, setup.max_waiting, setup.priority_step_s)
        adapters = {name: self.adapters.index(name) for name in self.adapters}
        self.tower = SimulatedTower(world)
        limits = EngineLimits(*sizes, pooled=self.forward_pass.spec.pooled, adapters=adapters, tower=self.tower)
        self.compile_pool = SimulatedPool(setup.model.vocab_size)
        self.grammar_queue = GrammarQueue(GrammarCache(self.compile_pool), lambda: None, setup.max_waiting)
        table = RequestTable(self.scheduler, self.board, self.grammar_queue, JudgedGrace(world))
        table.quote_queue = QuoteQueue(max_quotes=2)
        step_timing, quote_errors = StepTiming(), QuoteErrors(self.board, world.clock)
        delivery = FaultyDelivery(world, self.link, self.board, table, quote_errors)
        cache = VectorCache(setup.vector_cache_bytes) if setup.vector_cache_bytes else None
        vectors = VectorDelivery(self.link, self.board, table, delivery, cache)
        quoter = Quoter(self.scheduler, step_timing, quote_errors, world.clock)
        streams = StreamTable(self.link, self.board, table, delivery, world.clock)
        self.desk = JudgedDesk(world, self.tower, self.scheduler.pictures, delivery)
        parts = (table, delivery, vectors, streams, world.clock, quoter, self.desk)
        intake = FaultyIntake(world, self.scheduler, self.board, limits, *parts)
        canceller = Canceller(self.board, table, delivery, streams, world.clock)
        orders = AdapterTable(self.link, table, AdapterSet())
        others = (delivery, canceller, vectors, streams, orders, step_timing, self.desk)
        self.requests = RequestHandling(table, intake, *others)
        builder = FaultyBuilder(world, -(-setup.context // setup.page_size), has_adapters=bool(self.adapters))
        parts_of_loop = (self.scheduler, builder, self.requests, self.board, world.clock)
        self.engine = Engine(self.link, self.executor, *parts_of_loop)
        self.engine.draft_desk = make_desk(world, drafting, pass_sizes, self.executor, self.scheduler)
        self.is_draining, self.num_joined = False, 0
        self.places: dict[Sequence, tuple[float, int, int]] = {}
        """Place of each sequence in the queue by the policy: lower is sooner."""
        self.firsts: set[Sequence] = set()
        """Waiting sequences that go before all newcomers."""
        self.num_firsts = 0
        """How many of these there have been."""
        self.num_pages_passed: Counter[Sequence] = Counter()
        """Pages that later sequences took before each sequence that did not fit."""
        self.since: dict[Sequence, int] = {}
        """Tick in which each sequence was created."""
        self.owners: dict[bytes, tuple[object, object]] = {}
        """Salt of a sequence → the tenant's salt and the adapter, or the name of a request with embeddings."""
        self.broken: set[object] = set()
        """Sequences and (frontend, request id) on which the engine failed. They may end with a failure."""
        self.first_failed_tick: dict[int, int] = {}
        """Fault → tick in which a request first failed because of what the fault left in its pages."""

    def sequence_of(self, frontend: int, request_id: int) -> Sequence:
        """The sequence of an open request that has one."""
        return self.requests.table._by_frontend[frontend][request_id].sequence
