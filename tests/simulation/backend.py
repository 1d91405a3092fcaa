"""One life of the backend: the real engine between a simulated link and a simulated device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backend.engine.cancellation import Canceller
from penstock.backend.engine.intake import EngineLimits
from penstock.backend.engine.loop import Engine
from penstock.backend.engine.open_requests import OpenRequests
from penstock.backend.engine.requests import Requests
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.shm.memory.board import BackendBoard
from tests.simulation.chain_pass import PassSizes
from tests.simulation.device import SimulatedExecutor
from tests.simulation.faults import FaultyBuilder, FaultyDelivery, FaultyIntake, FaultyScheduler
from tests.simulation.link import SimulatedLink
from tests.simulation.rules import SimulatedCompiler

if TYPE_CHECKING:
    from penstock.backend.sequences.sequence import Sequence
    from tests.simulation.world import World


class Backend:
    """One backend process from start to death."""

    def __init__(self, world: World) -> None:
        setup = world.setup
        self.forward_pass = setup.model.new_pass(
            PassSizes(
                setup.num_pages,
                setup.num_host_pages,
                setup.page_size,
                setup.max_running,
                setup.max_batch_tokens,
                runs_ahead=setup.runs_ahead,
            )
        )
        self.link = SimulatedLink(world)
        self.executor = SimulatedExecutor(world, self.forward_pass, setup.capacity, setup.page_size)
        self.pool = PagePool(setup.num_pages, setup.num_host_pages)
        self.board = BackendBoard.create()
        self.scheduler = FaultyScheduler(
            world,
            self.pool,
            setup.page_size,
            setup.max_running,
            setup.max_batch_tokens,
            setup.max_park_steps,
            setup.num_plans_ahead,
        )
        limits = EngineLimits(setup.model.vocab_size, setup.context, setup.max_waiting, setup.priority_step_s)
        self.compiler = SimulatedCompiler(setup.model.vocab_size)
        self.grammar_queue = GrammarQueue(self.compiler, lambda: None, setup.max_waiting)
        table = OpenRequests(self.scheduler, self.board, self.grammar_queue)
        delivery = FaultyDelivery(world, self.link, self.board, table)
        intake = FaultyIntake(world, self.scheduler, self.board, limits, table, delivery, world.clock)
        self.requests = Requests(table, intake, delivery, Canceller(self.board, table, delivery, world.clock))
        self.engine = Engine(
            self.link,  # type: ignore[arg-type]
            self.executor,  # type: ignore[arg-type]
            self.scheduler,
            FaultyBuilder(world, setup.max_running, -(-setup.context // setup.page_size)),
            self.requests,
            self.board,
            world.clock,
        )
        self.is_draining = False
        self.num_joined = 0
        self.places: dict[Sequence, tuple[float, int]] = {}
        """Place of each sequence in the queue by the policy: lower is sooner."""
        self.since: dict[Sequence, int] = {}
        """Tick in which each sequence was created."""
        self.broken: set[object] = set()
        """Sequences and (frontend, request id) on which the engine failed. They may end with a failure."""
        self.first_failed_tick: dict[int, int] = {}
        """Fault → tick in which a request first failed because of what the fault left in its pages."""

    def sequence_of(self, frontend: int, request_id: int) -> Sequence:
        """The sequence of an open request that has one."""
        return self.requests.table._by_frontend[frontend][request_id].sequence
