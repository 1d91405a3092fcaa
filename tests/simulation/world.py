"""One seed's world: a backend, its frontends and their clients in one thread, and the chance that rules them all."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from penstock.backend.engine.cancellation import Canceller
from penstock.backend.engine.executor import ExecutorFailed
from penstock.backend.engine.intake import EngineLimits
from penstock.backend.engine.loop import Engine
from penstock.backend.engine.open_requests import OpenRequests
from penstock.backend.engine.requests import Requests
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.shm.link.events import FrontendDeath
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import FailureCode, Finish
from tests.simulation.device import SimulatedExecutor
from tests.simulation.faults import CURSES, FaultyBuilder, FaultyDelivery, FaultyIntake, FaultyScheduler
from tests.simulation.link import Frontend, Open, SimulatedLink
from tests.simulation.models import ChainPass, Fault, PassSizes, PlantedFault, Violation
from tests.simulation.rules import SimulatedCompiler
from tests.simulation.workload import Ask, Setup

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.scheduling.step_plan import PlanRow
    from penstock.backend.sequences.sequence import Sequence
    from penstock.backend.sequences.subscribers import Subscriber

_MAX_ARRIVAL_TICKS = 80
_SUSPEND_RATE = 0.001
_FAULTS = ("raise", "raise late", "raise at wait", "nan", "poison", "poison", "miscount")


class Backend:
    """One life of the backend process: the real engine between a simulated link and a simulated device."""

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
        """When each sequence's turn is, by the policy: lower is sooner."""
        self.since: dict[Sequence, int] = {}
        """The tick in which each sequence came."""
        self.struck: set[object] = set()
        """Sequences, and (frontend, request id), on which the engine broke down, and which may fail for it."""
        self.burnt: dict[int, int] = {}
        """Fault → the tick in which a request first failed for what it had left in its pages."""

    def sequence_of(self, frontend: int, request_id: int) -> Sequence:
        """The sequence of an open request that has one."""
        return self.requests.table._by_frontend[frontend][request_id].sequence


class World:
    """Runs a seed until everybody has what they asked for. Raises whatever goes wrong."""

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        self.rng = Random(seed)
        self.log = log
        self.setup = Setup.draw(self.rng, seed)
        self.covered: Counter[str] = Counter()
        self.now_s = 0.0
        self.tick = 0
        self.asks: list[Ask] = []
        self.frontends: dict[int, Frontend] = {}
        self._names: dict[tuple[int, int], Ask] = {}  # ever used towards this backend
        self._num_epochs = 0
        self._num_ids = 0
        self._num_faults = 0
        self._faults_allowed = True
        self._device_rate = 0.5
        self.backend = Backend(self)
        for _ in range(self.rng.randint(1, 3)):
            self._welcome()
        if log is not None:
            log(f"{self.setup}")

    def clock(self) -> float:
        return self.now_s

    def run(self) -> None:
        try:
            for _ in range(_MAX_ARRIVAL_TICKS):
                if len(self.asks) >= self.setup.num_asks:
                    break
                self._tick(self._happen)
            self._run_dry()
            self._judge_rest()
        finally:
            self.backend.board.close()

    def _run_dry(self) -> None:
        """No more trouble: from now on each tick brings a step, and all must end within the work that is left."""
        self._faults_allowed = False
        if self.backend.is_draining:
            self._restart()
        work = sum(len(ask.prompt) + ask.max_tokens for ask in self.asks if ask.ended is None)
        for _ in range(100 + 4 * work):
            if not any(frontend.asks or frontend.inbox for frontend in self.frontends.values()):
                break
            self._tick(self._read_all)
        else:
            left = [str(ask) for ask in self.asks if ask.ended is None]
            raise Violation(f"{left} never end")
        for _ in range(2 + self.setup.capacity):
            self._tick(self._read_all)

    def _tick(self, happen: Callable[[], None]) -> None:
        self.tick += 1
        self.now_s += self.rng.random() * 2
        if self.rng.random() < _SUSPEND_RATE:  # nobody ran for a while
            self.now_s += 100
            self.covered["suspended"] += 1
        if self.log is not None:
            self.log(f"{self.tick}: {self.now_s:.2f} s")
        happen()
        self._send()
        if not self._faults_allowed or self.rng.random() < self.setup.rates["compile"]:
            self.covered["grammars compiled"] += self.backend.compiler.advance()
        self._run_device()
        if not self._faults_allowed or self.rng.random() >= self.setup.rates["nap"]:
            self._turn()

    def _turn(self) -> None:
        backend = self.backend
        try:
            backend.engine.turn()
        except ExecutorFailed:
            self.covered["gave up"] += 1
            self._restart()
            return
        backend.engine.check_integrity()
        self._judge_turn()
        if backend.is_draining and backend.engine._is_drained():
            self.covered["drained"] += 1
            self._restart()

    # What may happen

    def _happen(self) -> None:
        rng, rates = self.rng, self.setup.rates
        if rng.random() < rates["submit"]:
            burst = rng.randint(2, 6) if rng.random() < rates["burst"] else 1
            for _ in range(burst):
                self._submit(self._draw_ask())
        if rng.random() < rates["bad request"]:
            self._submit_badly()
        if rng.random() < rates["cancel"]:
            self._cancel_one()
        if rng.random() < rates["storm"]:
            self._cancel_alike()
        if rng.random() < rates["frontend death"]:
            self._kill_frontend()
        if rng.random() < rates["restart"]:
            self._restart()
        if rng.random() < rates["drain"] and not self.backend.is_draining:
            self._note("drain")
            self.backend.is_draining = True
            self.backend.engine.drain(rng.choice((0.0, 5.0, 100.0)))
        for frontend in list(self.frontends.values()):
            if rng.random() >= rates["slow frontend"]:
                frontend.read()

    def _read_all(self) -> None:
        for frontend in self.frontends.values():
            while frontend.inbox:
                frontend.read()

    def _draw_ask(self) -> Ask:
        """A newcomer, that may ask for what others are just being told."""
        like = None
        if self.rng.random() < self.setup.rates["alike"]:
            models = [ask for ask in self.asks if ask.ended is None] or self.asks[-4:]
            like = self.rng.choice(models) if models else None
        ask = self.setup.draw_ask(self.rng, len(self.asks), like)
        if self.rng.random() < self.setup.rates["curse"]:
            ask.curse = self.rng.choice(CURSES)
        return ask

    def _submit(self, ask: Ask) -> None:
        frontend = self.rng.choice(list(self.frontends.values()))
        self.asks.append(ask)
        self._note(
            f"{ask} of {ask.prompt} {ask.sampling} stop {ask.stop_ids} salt {ask.salt!r} "
            f"share {ask.may_share} timeout {ask.timeout_ms} {ask.constraints} scored {ask.num_prompt_logprobs} "
            f"{'embedded ' if ask.is_embedded else ''}"
            f"expects {ask.expected} {ask.finish.name}"
        )
        self._send_ask(frontend, ask, self._num_ids, ask.timeout_ms)
        self._num_ids += 1

    def _send_ask(self, frontend: Frontend, ask: Ask, request_id: int, timeout_ms: int) -> None:
        self._names[frontend.epoch, request_id] = ask
        frontend.submit(ask, request_id, timeout_ms)

    def _submit_badly(self) -> None:
        ask = self._draw_ask()
        if self.rng.random() < 0.5:
            ask.prompt = [0] * (self.setup.context + 1)
        else:
            ask.prompt[self.rng.randrange(len(ask.prompt))] = self.rng.choice((-1, self.setup.model.vocab_size))
            ask.is_embedded = False
        ask.finish, ask.expected = Finish.REJECTED, []
        self._submit(ask)

    def _cancel_one(self) -> None:
        frontend = self.rng.choice(list(self.frontends.values()))
        if frontend.asks and self.rng.random() < 0.9:
            started = [i for i in frontend.asks if self._is_just_planned(frontend.epoch, i)]
            request_id = self.rng.choice(started if started and self.rng.random() < 0.5 else list(frontend.asks))
            frontend.cancel(request_id)
            if self.rng.random() < 0.2:
                frontend.cancel(request_id)
        else:  # one of long ago, or of nobody
            frontend.cancel(self.rng.randrange(self._num_ids + 3))

    def _is_just_planned(self, epoch: int, request_id: int) -> bool:
        """Its first step, or the first one since it was preempted, is the last one that was planned."""
        found = self.backend.requests.table.find(epoch, request_id)
        return found is not None and found.sequence in self.backend.scheduler.started

    def _cancel_alike(self) -> None:
        """All with one prompt drop, and perhaps somebody asks for the same in that moment."""
        prompt = self.rng.choice(self.setup.prompts)
        newcomer_comes = self.rng.random() < 0.5
        for frontend in self.frontends.values():
            for request_id in [i for i, ask in frontend.asks.items() if ask.prompt == prompt]:
                frontend.cancel(request_id)
                self.covered["dropped in a storm"] += 1
        if newcomer_comes:
            self._submit(self._draw_ask())

    def _welcome(self) -> Frontend:
        self._num_epochs += 1
        frontend = self.frontends[self._num_epochs] = Frontend(self._num_epochs, self.setup.credit)
        return frontend

    def _kill_frontend(self) -> None:
        """What it had sent may still arrive, then the news of its death; a newcomer takes its place."""
        epoch = self.rng.choice(list(self.frontends))
        frontend = self.frontends.pop(epoch)
        self._note(f"frontend {epoch} dies with {[str(a) for a in frontend.asks.values()]}")
        for ask in frontend.asks.values():
            ask.ended = Finish.CANCELLED
        for event in list(frontend.wire)[: self.rng.randrange(len(frontend.wire) + 1)]:
            self.backend.link.take(event)
        self.backend.link.take(FrontendDeath(epoch))
        self.covered["frontend deaths"] += 1
        self._welcome()

    def _restart(self) -> None:
        """The backend dies. Of its last words some are read; then all open requests go to the next one."""
        self._note("the backend dies, and another comes")
        self.covered["backend restarts"] += 1
        self.backend.board.close()
        self.backend = Backend(self)
        self._names.clear()
        for old in list(self.frontends.values()):
            for _ in range(self.rng.randrange(len(old.inbox) + 1)):
                old.read()
            del self.frontends[old.epoch]
            new = self._welcome()
            for request_id, ask in old.asks.items():
                self.covered["resumed"] += bool(ask.got)
                self._send_ask(new, ask, request_id, ask.timeout_ms)

    def _send(self) -> None:
        """What frontends sent reaches the backend, in each one's order."""
        for frontend in self.frontends.values():
            slow = self._faults_allowed and self.rng.random() < self.setup.rates["slow wire"]
            count = self.rng.randrange(len(frontend.wire) + 1) if slow else len(frontend.wire)
            for _ in range(count):
                self.backend.link.take(frontend.wire.popleft())

    def _run_device(self) -> None:
        if not self._faults_allowed:
            count = 3
        else:
            if self.setup.pace == "changing" and self.rng.random() < 0.1:
                self._device_rate = self.rng.choice((0.2, 0.7, 0.9))
            elif self.setup.pace != "changing":
                self._device_rate = {"slow": 0.45, "even": 0.75, "fast": 0.9}[self.setup.pace]
            count = 0
            while self.rng.random() < self._device_rate:
                count += 1
        while count and self.backend.executor.advance():
            count -= 1

    def device_goes_on(self) -> None:
        """The loop is in the middle of a turn, and the device does not wait for it."""
        while self.rng.random() < 0.2 and self.backend.executor.advance():
            pass

    def is_struck(self, kind: str, subscriber: Subscriber) -> bool:
        """Whether the engine breaks down on the request now."""
        ask = self._names[subscriber.frontend, subscriber.request_id]
        return ask.curse == kind and self._faults_allowed and self.rng.random() < 0.5

    def strike(self, kind: str, sequences: list[Sequence]) -> None:
        """One sequence is blamed; of several nobody, for the engine cannot know whose the fault is."""
        if any(self.is_struck(kind, subscriber) for sequence in sequences for subscriber in sequence.subscribers):
            self.covered[f"curse: {kind}"] += 1
            if len(sequences) == 1:
                self.backend.struck.add(sequences[0])
            raise PlantedFault(kind)

    def strike_request(self, kind: str, subscriber: Subscriber) -> None:
        if self.is_struck(kind, subscriber):
            self.backend.struck.add((subscriber.frontend, subscriber.request_id))
            raise PlantedFault(kind)

    def draw_fault(self, sequences: list[Sequence]) -> Fault | None:
        """What goes wrong in a step of these."""
        try:
            self.strike("step", sequences)
        except PlantedFault:
            return Fault(self.rng.choice(("raise", "raise late", "raise at wait", "miscount")), 0, 0)
        num_rows = len(sequences)
        if num_rows == 0 or not self._faults_allowed or self.rng.random() >= self.setup.rates["fault"]:
            return None
        self._num_faults += 1
        fault = Fault(self.rng.choice(_FAULTS), self.rng.randrange(num_rows), self._num_faults)
        self.covered[f"fault: {fault.kind}"] += 1
        self._note(f"{fault}")
        return fault

    def _note(self, text: str) -> None:
        if self.log is not None:
            self.log(text)

    # What is noted and judged

    def ask_of(self, epoch: int, request_id: int) -> Ask:
        return self._names[epoch, request_id]

    def note_submission(self, frontend: int, request_id: int, arrived_s: float) -> None:
        """The engine has taken it on, or refused it."""
        backend, ask = self.backend, self._names[frontend, request_id]
        heard = backend.link.open.get((frontend, request_id))
        if heard is not None:
            heard.is_judged = True
        found = backend.requests.table.find(frontend, request_id)
        if backend.board.requests_coalesced > backend.num_joined:
            backend.num_joined += 1
            self.covered["joined"] += 1
            self.covered["joined late"] += heard is None or heard.next_index > 0
            self.covered["joined with constraints"] += ask.constraints is not None
            self.covered["joined for log probabilities"] += ask.sampling.num_logprobs >= 0
        elif found is not None:
            step_s = self.setup.priority_step_s
            rank = arrived_s + ask.priority * step_s if step_s else 0.0
            backend.places[found.sequence] = rank, len(backend.places)
            backend.since[found.sequence] = self.tick
        if heard is not None and ask.constraints is not None:
            self.covered["resumed with constraints"] += heard.next_index > 0 and ask.num_lives > 1

    def note_cancel(self, heard: Open | None, epoch: int, request_id: int) -> None:
        """In which state it meets its request."""
        state = "of nothing open"
        if self.backend.grammar_queue.find(epoch, request_id) is not None:
            state = "while compiling"
        elif heard is not None:
            sequence = self.backend.sequence_of(epoch, request_id)
            if len(sequence.subscribers) > 1:
                state = "of a shared sequence"
            elif sequence in self.backend.scheduler._waiting._key_of:
                state = "while parked"
            elif sequence.slot is None:
                state = "while preempted" if sequence.generation else "while waiting"
            elif sequence.stopped_generation == sequence.generation:
                state = "while finishing"
            else:
                state = "in decode" if heard.is_started else "in prefill"
        self.covered[f"cancel {state}"] += 1

    def note_plan(self, rows: list[PlanRow]) -> None:
        """Whose turn it is, and how far they go."""
        places, waiting = self.backend.places, self.backend.scheduler._waiting
        admitted = self.backend.scheduler.started
        if admitted:
            queue = [places[sequence] for sequence in waiting.sequences() if sequence not in waiting._key_of]
            if queue and max(places[sequence] for sequence in admitted) > min(queue):
                raise Violation("somebody is admitted before their turn")
        num_plans = self.backend.scheduler._num_plans
        self.covered["stopped waiting"] += sum(0 < sequence.parking.deadline_step <= num_plans for sequence in admitted)
        for row in rows:
            listeners = [self._names[s.frontend, s.request_id] for s in row.sequence.subscribers]
            wanted = max(len(ask.prompt) + ask.max_tokens for ask in listeners)
            if row.end >= min(wanted, self.setup.context):
                raise Violation(f"{[str(ask) for ask in listeners]} do not want what is planned")
            if (row.sequence, row.generation) in self.backend.scheduler.tried:
                self.covered["tried apart"] += row.needs_slot_init
            elif row.needs_slot_init and row.start > row.sequence.kv.num_cached:
                self.covered["rewound"] += 1
            elif row.needs_slot_init and row.sequence.generation:
                self.covered["preempted and resumed"] += 1
                self.covered["resumed with embeddings"] += row.sequence.embeddings is not None

    def judge_copy(self, source: int, num_tokens: int) -> None:
        """As it is planned."""
        forward_pass = self.backend.forward_pass
        if (
            isinstance(forward_pass, ChainPass)
            and forward_pass.poison_in([source], num_tokens) & self.backend.burnt.keys()
        ):
            raise Violation("a page is copied for which a request has failed")

    def judge_restores(self, restores: tuple[tuple[int, int], ...]) -> None:
        """As they are planned."""
        self.covered["restored from the host"] += len(restores)

    def judge_rejection(self, heard: Open, code: FailureCode) -> None:
        backend, ask = self.backend, heard.ask
        self.covered[f"refused {code.name}"] += 1
        match code:
            case FailureCode.OVERLOADED:
                room = self.setup.max_running if ask.got else backend.scheduler.num_free_slots
                allowed = backend.scheduler.num_waiting >= self.setup.max_waiting + room
                allowed |= backend.grammar_queue.num_waiting >= self.setup.max_waiting
            case FailureCode.SHUTTING_DOWN:
                allowed = backend.is_draining
            case FailureCode.BAD_TOKEN | FailureCode.CONTEXT_TOO_LONG | FailureCode.BAD_GRAMMAR:
                allowed = ask.finish is Finish.REJECTED
            case _:
                allowed = False
        if not allowed or heard.is_judged:
            raise Violation(f"{ask} is refused: {code.name}")

    def judge_failure(self, heard: Open, key: tuple[int, int]) -> None:
        backend = self.backend
        sequence = backend.sequence_of(*key)
        if sequence in backend.struck or key in backend.struck:
            self.covered["failed by a curse"] += 1
            return
        if (sequence, sequence.generation) not in backend.executor.faulty:
            raise Violation(f"{heard.ask} fails without a fault")
        was_bad = backend.executor.faulty[sequence, sequence.generation]
        if not was_bad or not isinstance(backend.forward_pass, ChainPass):
            return
        poison = backend.forward_pass.poison_in(sequence.kv.pages, len(sequence.tokens))
        if any(map(backend.pool.host_offload.contains, sequence.kv.page_hashes)):
            raise Violation(f"{heard.ask} fails for its pages, and one of them stays on the host")
        if any(backend.burnt.get(fault, self.tick) < backend.since[sequence] for fault in poison):
            raise Violation(f"{heard.ask} fails for what others had failed for before it came")
        for fault in poison:
            backend.burnt.setdefault(fault, self.tick)

    def _judge_turn(self) -> None:
        backend = self.backend
        heard_by_engine = {(f, i) for f, by_id in backend.requests.table._by_frontend.items() for i in by_id}
        heard_by_engine |= backend.grammar_queue._waiting.keys()
        if heard_by_engine != backend.link.open.keys():
            raise Violation(f"the engine has {heard_by_engine} open, the link {set(backend.link.open)}")
        if backend.scheduler.num_running + backend.scheduler.num_waiting and not backend.executor.is_busy:
            raise Violation("there is work to do, the device is idle, and nothing will wake the loop")
        self.covered["planned late"] += backend.engine.plan_due_s is not None
        for (frontend, request_id), heard in backend.link.open.items():
            if heard.deadline_s is not None and heard.deadline_s <= self.now_s:
                raise Violation(f"{heard.ask} lives beyond its deadline")
            if backend.grammar_queue.find(frontend, request_id) is not None:
                continue
            sequence, subscriber = backend.requests.table._by_frontend[frontend][request_id]
            if (sequence.salt == heard.ask.salt) != (heard.embeddings is None):
                raise Violation(f"{heard.ask} listens to a sequence of another tenant")
            if heard.next_index != len(sequence.tokens) - len(heard.ask.prompt) and subscriber.next_index <= len(
                sequence.tokens
            ):
                raise Violation(f"{heard.ask} has had {heard.next_index} tokens of {len(sequence.tokens)}")
        self.covered["parked"] += len(backend.scheduler._waiting._key_of)
        self._judge_board()

    def _judge_board(self) -> None:
        board, requests = self.backend.board, self.backend.requests
        ended = board.requests_finished + board.requests_cancelled + board.requests_expired + board.requests_failed
        if board.requests_accepted != ended + requests.table._num_subscribed:
            raise Violation(f"{board.requests_accepted} accepted, {ended} ended, {requests.table.num_open} open")
        if board.pages_used > self.setup.num_pages or board.pages_used + board.pages_idle > self.setup.num_pages:
            raise Violation(f"{board.pages_used} pages used and {board.pages_idle} idle")
        if board.host_pages_used > self.setup.num_host_pages:
            raise Violation(f"{board.host_pages_used} pages on the host of {self.setup.num_host_pages}")

    def _judge_rest(self) -> None:
        backend = self.backend
        scheduler, board = backend.scheduler, backend.board
        if self.covered["rewound"] > self.covered["joined"] + self.covered["scored"]:  # a prompt may have stop ids
            raise Violation("tokens were computed again though nobody had joined")
        if backend.pool.num_held or scheduler.num_running or scheduler.num_waiting or backend.requests.table.num_open:
            raise Violation("something is left over")
        if (
            len(backend.requests.table.coalescer)
            or scheduler._prefix_cache._computing
            or scheduler._prefix_cache._filling
            or backend.executor.is_busy
        ):
            raise Violation("something is still remembered")
        for ask in self.asks:
            whole = ask.ended in (Finish.STOP, Finish.LENGTH)
            if ask.got != (ask.expected if whole else ask.expected[: len(ask.got)]):
                raise Violation(f"{ask} got {ask.got}, was to get {ask.expected}")
        self.covered["preempted"] += board.preemptions
        self.covered["saved to the host"] += board.pages_saved
        self.covered["tokens"] += board.generated_tokens
        self.covered["steps"] += board.steps
        self.covered["requests"] += len(self.asks)


def run_seed(seed: int, log: Callable[[str], None] | None = None) -> Counter[str]:
    """What the seed's world met with. Raises Violation, or what the engine raises."""
    world = World(seed, log)
    world.run()
    return world.covered
