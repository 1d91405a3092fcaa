"""Judges what the engine does in a simulated world, and counts what occurs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.shm.messages import FailureCode, Finish
from tests.simulation.chain_pass import ChainPass
from tests.simulation.violations import Violation

if TYPE_CHECKING:
    from penstock.backend.scheduling.step_plan import PlanRow
    from tests.simulation.link import Open
    from tests.simulation.world import World


class Judge:
    """Raises Violation when the engine breaks a rule."""

    def __init__(self, world: World) -> None:
        self._world = world

    def note_submission(self, frontend: int, request_id: int, arrived_s: float) -> None:
        """The engine has given the request a sequence, or refused it."""
        backend, ask = self._world.backend, self._world.names[frontend, request_id]
        opened = backend.link.open.get((frontend, request_id))
        if opened is not None:
            opened.is_judged = True
        found = backend.requests.table.find(frontend, request_id)
        if backend.board.requests_coalesced > backend.num_joined:
            backend.num_joined += 1
            self._world.covered["joined"] += 1
            self._world.covered["joined late"] += opened is None or opened.next_index > 0
            self._world.covered["joined with constraints"] += ask.constraints is not None
            self._world.covered["joined for log probabilities"] += ask.sampling.num_logprobs >= 0
        elif found is not None:
            step_s = self._world.setup.priority_step_s
            rank = arrived_s + ask.priority * step_s if step_s else 0.0
            backend.places[found.sequence] = rank, len(backend.places)
            backend.since[found.sequence] = self._world.tick
        if opened is not None and ask.constraints is not None:
            self._world.covered["resumed with constraints"] += opened.next_index > 0 and ask.num_lives > 1

    def note_cancel(self, opened: Open | None, epoch: int, request_id: int) -> None:
        """Count the state in which a cancel meets its request."""
        state = "of nothing open"
        if self._world.backend.grammar_queue.find(epoch, request_id) is not None:
            state = "while compiling"
        elif opened is not None:
            sequence = self._world.backend.sequence_of(epoch, request_id)
            if len(sequence.subscribers) > 1:
                state = "of a shared sequence"
            elif sequence in self._world.backend.scheduler._waiting._key_of:
                state = "while parked"
            elif sequence.slot is None:
                state = "while preempted" if sequence.generation else "while waiting"
            elif sequence.stopped_generation == sequence.generation:
                state = "while finishing"
            else:
                state = "in decode" if opened.is_started else "in prefill"
        self._world.covered[f"cancel {state}"] += 1

    def note_plan(self, rows: list[PlanRow]) -> None:
        """Judge which sequences a plan admits, and how far its rows go."""
        places, waiting = self._world.backend.places, self._world.backend.scheduler._waiting
        admitted = self._world.backend.scheduler.started
        if admitted:
            queue = [places[sequence] for sequence in waiting.sequences() if sequence not in waiting._key_of]
            if queue and max(places[sequence] for sequence in admitted) > min(queue):
                raise Violation("a sequence is admitted before its turn")
        num_plans = self._world.backend.scheduler._num_plans
        self._world.covered["stopped waiting"] += sum(
            0 < sequence.parking.deadline_step <= num_plans for sequence in admitted
        )
        for row in rows:
            listeners = [self._world.names[s.frontend, s.request_id] for s in row.sequence.subscribers]
            wanted = max(len(ask.prompt) + ask.max_tokens for ask in listeners)
            if row.end >= min(wanted, self._world.setup.context):
                raise Violation(f"{[str(ask) for ask in listeners]} do not need what is planned")
            if (row.sequence, row.generation) in self._world.backend.scheduler.bisected:
                self._world.covered["bisected"] += row.needs_slot_init
            elif row.needs_slot_init and row.start > row.sequence.kv.num_cached:
                self._world.covered["rewound"] += 1
            elif row.needs_slot_init and row.sequence.generation:
                self._world.covered["preempted and resumed"] += 1
                self._world.covered["resumed with embeddings"] += row.sequence.embeddings is not None

    def judge_copy(self, source: int, num_tokens: int) -> None:
        """Judge a page copy when it is planned."""
        forward_pass = self._world.backend.forward_pass
        if (
            isinstance(forward_pass, ChainPass)
            and forward_pass.poison_in([source], num_tokens) & self._world.backend.first_failed_tick.keys()
        ):
            raise Violation("a page is copied although a request has failed because of it")

    def judge_restores(self, restores: tuple[tuple[int, int], ...]) -> None:
        """Count page restores when they are planned."""
        self._world.covered["restored from the host"] += len(restores)

    def judge_rejection(self, opened: Open, code: FailureCode) -> None:
        backend, ask = self._world.backend, opened.ask
        self._world.covered[f"refused {code.name}"] += 1
        match code:
            case FailureCode.OVERLOADED:
                room = self._world.setup.max_running if ask.got else backend.scheduler.num_free_slots
                allowed = backend.scheduler.num_waiting >= self._world.setup.max_waiting + room
                allowed |= backend.grammar_queue.num_waiting >= self._world.setup.max_waiting
            case FailureCode.SHUTTING_DOWN:
                allowed = backend.is_draining
            case FailureCode.BAD_TOKEN | FailureCode.CONTEXT_TOO_LONG | FailureCode.BAD_GRAMMAR:
                allowed = ask.finish is Finish.REJECTED
            case _:
                allowed = False
        if not allowed or opened.is_judged:
            raise Violation(f"{ask} is refused: {code.name}")

    def judge_failure(self, opened: Open, key: tuple[int, int]) -> None:
        backend = self._world.backend
        sequence = backend.sequence_of(*key)
        if sequence in backend.broken or key in backend.broken:
            self._world.covered["failed by an engine error"] += 1
            return
        if (sequence, sequence.generation) not in backend.executor.faulty:
            raise Violation(f"{opened.ask} fails without a fault")
        was_bad = backend.executor.faulty[sequence, sequence.generation]
        if not was_bad or not isinstance(backend.forward_pass, ChainPass):
            return
        poison = backend.forward_pass.poison_in(sequence.kv.pages, len(sequence.tokens))
        if any(map(backend.pool.host_offload.contains, sequence.kv.page_hashes)):
            raise Violation(f"{opened.ask} fails because of its pages, and one of them stays on the host")
        if any(backend.first_failed_tick.get(fault, self._world.tick) < backend.since[sequence] for fault in poison):
            raise Violation(f"{opened.ask} fails for a fault that had failed others before it was created")
        for fault in poison:
            backend.first_failed_tick.setdefault(fault, self._world.tick)

    def judge_turn(self) -> None:
        backend = self._world.backend
        open_in_engine = {(f, i) for f, by_id in backend.requests.table._by_frontend.items() for i in by_id}
        open_in_engine |= backend.grammar_queue._waiting.keys()
        if open_in_engine != backend.link.open.keys():
            raise Violation(f"the engine has {open_in_engine} open, the link {set(backend.link.open)}")
        if backend.scheduler.num_running + backend.scheduler.num_waiting and not backend.executor.is_busy:
            raise Violation("there is work, the device is idle, and nothing will wake the loop")
        self._world.covered["planned late"] += backend.engine.plan_due_s is not None
        for (frontend, request_id), opened in backend.link.open.items():
            if opened.deadline_s is not None and opened.deadline_s <= self._world.now_s:
                raise Violation(f"{opened.ask} is open after its deadline")
            if backend.grammar_queue.find(frontend, request_id) is not None:
                continue
            sequence, subscriber = backend.requests.table._by_frontend[frontend][request_id]
            if (sequence.salt == opened.ask.salt) != (opened.embeddings is None):
                raise Violation(f"{opened.ask} subscribes to a sequence of another tenant")
            if opened.next_index != len(sequence.tokens) - len(opened.ask.prompt) and subscriber.next_index <= len(
                sequence.tokens
            ):
                raise Violation(f"{opened.ask} has received {opened.next_index} tokens of {len(sequence.tokens)}")
        self._world.covered["parked"] += len(backend.scheduler._waiting._key_of)
        self._judge_board()

    def _judge_board(self) -> None:
        board, requests = self._world.backend.board, self._world.backend.requests
        ended = board.requests_finished + board.requests_cancelled + board.requests_expired + board.requests_failed
        if board.requests_accepted != ended + requests.table._num_subscribed:
            raise Violation(f"{board.requests_accepted} accepted, {ended} ended, {requests.table.num_open} open")
        if (
            board.pages_used > self._world.setup.num_pages
            or board.pages_used + board.pages_idle > self._world.setup.num_pages
        ):
            raise Violation(f"{board.pages_used} pages used and {board.pages_idle} idle")
        if board.host_pages_used > self._world.setup.num_host_pages:
            raise Violation(f"{board.host_pages_used} pages on the host of {self._world.setup.num_host_pages}")

    def judge_end(self) -> None:
        backend = self._world.backend
        scheduler, board = backend.scheduler, backend.board
        if (
            self._world.covered["rewound"] > self._world.covered["joined"] + self._world.covered["scored"]
        ):  # a scored prompt may contain stop ids
            raise Violation("tokens were computed again although no request had joined")
        if backend.pool.num_held or scheduler.num_running or scheduler.num_waiting or backend.requests.table.num_open:
            raise Violation("pages, sequences or requests are left over")
        if (
            len(backend.requests.table.coalescer)
            or scheduler._prefix_cache._computing
            or scheduler._prefix_cache._filling
            or backend.executor.is_busy
        ):
            raise Violation("the engine still remembers a sequence")
        for ask in self._world.asks:
            whole = ask.ended in (Finish.STOP, Finish.LENGTH)
            if ask.got != (ask.expected if whole else ask.expected[: len(ask.got)]):
                raise Violation(f"{ask} got {ask.got}, expected {ask.expected}")
        self._world.covered["preempted"] += board.preemptions
        self._world.covered["saved to the host"] += board.pages_saved
        self._world.covered["tokens"] += board.generated_tokens
        self._world.covered["steps"] += board.steps
        self._world.covered["requests"] += len(self._world.asks)
