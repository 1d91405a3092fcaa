"""Judges what the engine does in a simulated world, and counts what occurs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.shm.messages import FailureCode, Finish
from tests.simulation.chain_pass import ChainPass
from tests.simulation.violations import Violation

if TYPE_CHECKING:
    from penstock.backend.scheduling.step_plan import PlanRow
    from penstock.backend.sequences.sequence import Sequence
    from tests.simulation.link import Open
    from tests.simulation.workload import Ask
    from tests.simulation.world import World


_MOST_PASSING = 16
"""Sequences of other tenants may pass one that does not fit until they have taken this many times as many pages as it
needs; those of its own tenant until they have taken as many."""


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
            self._world.covered["joined with pictures"] += bool(ask.spans)
            self._world.covered["joined for log probabilities"] += ask.sampling.num_logprobs >= 0
            if found is not None and found.sequence.order < 0 and ask.admitted_ns:
                rank, admitted_ns, number = backend.places[found.sequence]
                own_rank, own_admitted_ns = self._place(ask, arrived_s)
                backend.places[found.sequence] = min(rank, own_rank), min(admitted_ns, own_admitted_ns), number
        elif found is not None:
            backend.places[found.sequence] = *self._place(ask, arrived_s), len(backend.places)
            backend.since[found.sequence] = self._world.tick
        if opened is not None and ask.constraints is not None:
            self._world.covered["resumed with constraints"] += opened.next_index > 0 and ask.num_lives > 1

    def _place(self, ask: Ask, arrived_s: float) -> tuple[float, int]:
        """Rank and time of admission that the request has by the policy."""
        step_s = self._world.setup.priority_step_s
        first_s = min(arrived_s, ask.admitted_ns / 1e9) if ask.admitted_ns else arrived_s
        return first_s + ask.priority * step_s if step_s else 0.0, ask.admitted_ns or 1 << 63

    def note_cancel(self, opened: Open | None, epoch: int, request_id: int) -> None:
        """Count the state in which a cancel meets its request."""
        state = "of nothing open"
        if self._world.backend.grammar_queue.find(epoch, request_id) is not None:
            state = "while compiling"
        elif self._world.backend.requests.table.quote_queue.find(epoch, request_id) is not None:
            state = "while waiting for a quote"
        elif opened is not None:
            sequence, encoding = self._world.backend.sequence_of(epoch, request_id), self._world.backend.tower.encoding
            is_source = encoding is not None and opened.ask.spans and sequence.num_computed < len(opened.ask.prompt)
            self._world.covered["cancel while encoding"] += bool(is_source)
            if len(sequence.subscribers) > 1:
                state = "of a shared sequence"
            elif sequence in self._world.backend.scheduler._waiting._key_of:
                state = "while parked"
            elif sequence.slot is None:
                state = "while preempted" if sequence.generation else "while waiting"
            elif sequence.final_generation == sequence.generation:
                state = "while finishing"
            else:
                state = "in decode" if opened.is_started else "in prefill"
        self._world.covered[f"cancel {state}"] += 1

    def note_scheduled(self, sequence: Sequence) -> None:
        """Note a sequence that ran in an earlier backend. As many as run at a time go before all newcomers."""
        backend = self._world.backend
        asks = [(self._world.names[s.frontend, s.request_id], s.next_index) for s in sequence.subscribers]
        has_run = any(ask.admitted_ns and next_index > len(ask.prompt) for ask, next_index in asks)
        if has_run and backend.num_firsts < self._world.setup.max_running:
            backend.num_firsts += 1
            backend.firsts.add(sequence)

    def note_admission(self, sequence: Sequence, num_pages: int, was_passed: bool, passes: list[Sequence]) -> None:
        """Judge whether it is the sequence's turn, and count the pages that it takes before those that it passes."""
        backend = self._world.backend
        waiting, places = backend.scheduler._waiting, backend.places
        elsewhere = waiting._key_of.keys() | waiting._passed | waiting.awaiting.keys()
        queued = [other for other in waiting.sequences() if other not in elsewhere]
        self._world.covered["admitted after being passed"] += was_passed
        backend.num_pages_passed.pop(sequence, None)
        firsts = [other for other in queued if other in backend.firsts]
        is_first = sequence in backend.firsts
        backend.firsts.discard(sequence)
        self._world.covered["admitted before newcomers"] += is_first and len(firsts) < len(queued)
        if not was_passed and (is_first or firsts):
            # Of different tenants, those admitted at the same time have no order.
            if not is_first or any(places[other][:2] < places[sequence][:2] for other in firsts):
                raise Violation("a sequence is admitted before one that ran in an earlier backend")
        elif not was_passed:
            # Requests take turns: an input that is not the first of its request may be passed by others.
            ordered = [other for other in queued if other.group in (None, sequence.group)]
            if any(other.account is sequence.account and places[other] < places[sequence] for other in ordered):
                raise Violation("a sequence is admitted before its turn")
            if any(other.account.service < sequence.account.service for other in queued):
                raise Violation("a tenant is served before one that has received less")
        for other in passes:
            backend.num_pages_passed[other] += num_pages
            self._world.covered["passed"] += 1
            times = _MOST_PASSING if other.account is not sequence.account else 1
            most = times * (1 + len(other.tokens) // self._world.setup.page_size)
            if backend.num_pages_passed[other] >= most + num_pages:
                raise Violation(f"a sequence has been passed by {backend.num_pages_passed[other]} pages")

    def note_plan(self, rows: list[PlanRow]) -> None:
        """Judge how far a plan's rows go."""
        admitted = self._world.backend.scheduler.started
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
                self._world.covered["resumed with pictures"] += row.sequence.pictures is not None

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
                room, limit = backend.scheduler.num_free_slots, self._world.setup.max_waiting
                held = backend.requests.table.restart_grace._delayed
                num_waiting = backend.scheduler.num_waiting + len(held) - room
                most = max(num_waiting, num_compiling := backend.grammar_queue.num_waiting)
                waiting = [*backend.scheduler._waiting.sequences(), *held]
                has_others = any(sequence.tenant == ask.tenant for sequence in waiting)
                has_others |= bool(num_compiling and backend.grammar_queue.num_waiting_of[ask.tenant])
                allowed = most >= limit and not ask.admitted_ns and (has_others or most >= 2 * limit)
                self._world.covered["refused over its share"] += most < 2 * limit
            case FailureCode.SHUTTING_DOWN:
                allowed = backend.is_draining
            case FailureCode.NO_ADAPTER:
                allowed = bool(ask.adapter) and ask.adapter not in backend.adapters
            case FailureCode.TOO_LATE:
                quote, deadline_s = opened.quote, opened.deadline_s
                allowed = ask.refuses_late and not ask.admitted_ns and quote is not None and deadline_s is not None
            case FailureCode.BAD_TOKEN | FailureCode.CONTEXT_TOO_LONG | FailureCode.BAD_GRAMMAR:
                allowed = ask.finish is Finish.REJECTED
            case FailureCode.INTERNAL:  # its grammar kills the compilers
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
        # Pages of a prompt that is not computed yet hold what their last owner left. A prompt that is scored fails
        # before its step's tokens count as computed.
        is_decoding = len(sequence.tokens) > sequence.num_given_tokens
        num_applied = len(sequence.tokens) if is_decoding else sequence.kv.num_prefilled
        num_launched = min(len(sequence.tokens), sequence.num_computed)
        poison = backend.forward_pass.poison_in(sequence.kv.pages, num_applied)
        if any(map(backend.pool.host_offload.contains, sequence.kv.page_hashes)):
            raise Violation(f"{opened.ask} fails because of its pages, and one of them stays on the host")
        if any(backend.first_failed_tick.get(fault, self._world.tick) < backend.since[sequence] for fault in poison):
            raise Violation(f"{opened.ask} fails for a fault that had failed others before it was created")
        for fault in poison | backend.forward_pass.poison_in(sequence.kv.pages, num_launched):
            backend.first_failed_tick.setdefault(fault, self._world.tick)

    def judge_turn(self) -> None:
        backend = self._world.backend
        open_in_engine = {(f, i) for f, by_id in backend.requests.table._by_frontend.items() for i in by_id}
        quote_queue = backend.requests.table.quote_queue
        self._world.covered["quoted in a later turn"] += quote_queue.num_waiting
        open_in_engine |= backend.grammar_queue._waiting.keys() | quote_queue._waiting.keys()
        if open_in_engine != backend.link.open.keys():
            raise Violation(f"the engine has {open_in_engine} open, the link {set(backend.link.open)}")
        is_awaiting = any(sequence.awaits_mask for sequence in backend.scheduler._running.sequences)
        num_scheduled = backend.scheduler.num_running + backend.scheduler.num_waiting
        is_awaiting |= backend.tower.encoding is not None
        if num_scheduled and not (backend.executor.is_busy or backend.executor.has_work or is_awaiting):
            raise Violation("there is work, the device is idle, and nothing will wake the loop")
        self._world.covered["planned late"] += backend.engine.plan_due_s is not None
        for (frontend, request_id), opened in backend.link.open.items():
            if opened.deadline_s is not None and opened.deadline_s <= self._world.now_s:
                raise Violation(f"{opened.ask} is open after its deadline")
            if backend.requests.table.find(frontend, request_id) is None:
                continue  # it waits for its grammar or its quote
            sequence, subscriber = backend.requests.table._by_frontend[frontend][request_id]
            owner = (opened.ask.salt, opened.ask.adapter) if opened.embeddings is None else (frontend, request_id)
            if backend.owners.setdefault(sequence.salt, owner) != owner:
                raise Violation(f"{opened.ask} subscribes to a sequence of another tenant or adapter")
            if sequence.order < 0:
                continue  # it is held, and receives nothing yet
            if opened.next_index != len(sequence.tokens) - len(opened.ask.prompt) and subscriber.next_index <= len(
                sequence.tokens
            ):
                raise Violation(f"{opened.ask} has received {opened.next_index} tokens of {len(sequence.tokens)}")
        self._world.covered["parked"] += len(backend.scheduler._waiting._key_of)
        self._judge_groups()
        self._judge_board()

    def _judge_groups(self) -> None:
        """Rounds are remembered only of requests with inputs that wait."""
        scheduler = self._world.backend.scheduler
        waiting = {(sequence.account, sequence.group) for sequence in scheduler._waiting.sequences()}
        for account in scheduler._tenants._accounts.values():
            if any((account, group) not in waiting for group in account._rounds):
                raise Violation(f"rounds of {account._rounds} are left over")

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
        covered = self._world.covered
        # A row whose mask is late runs again.
        if covered["rewound"] > covered["joined"] + covered["masks late"]:
            raise Violation("tokens were computed again although no request had joined")
        if backend.pool.num_held or scheduler.num_running or scheduler.num_waiting or backend.requests.table.num_open:
            raise Violation("pages, sequences or requests are left over")
        if backend.requests.intake._refused_frontends:
            raise Violation("a frontend that was refused never learns that there is room")
        backend.desk.judge_end()
        scheduler._running.prefix_cache.check_integrity({}, set())
        if len(backend.requests.table.coalescer) or backend.executor.is_busy:
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
