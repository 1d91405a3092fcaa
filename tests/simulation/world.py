"""One seed's world: a backend, its frontends and their clients in one thread, driven by one random generator."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from penstock.backend.engine.steps.executor import ExecutorFailed
from penstock.shm.link.events import FrontendDeath
from penstock.shm.messages import Finish
from tests.simulation.backend import Backend
from tests.simulation.chain_pass import Fault
from tests.simulation.faults import ENGINE_ERRORS
from tests.simulation.judge import Judge
from tests.simulation.link import Frontend
from tests.simulation.violations import PlantedFault, Violation
from tests.simulation.workload import Ask, Setup

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.sequences.sequence import Sequence
    from penstock.backend.sequences.subscribers import Subscriber

_MAX_ARRIVAL_TICKS = 80
_SUSPEND_RATE = 0.001
_FAULTS = ("raise", "raise late", "raise at wait", "nan", "poison", "poison", "miscount")


class World:
    """Runs a seed until every request has ended. Raises what goes wrong."""

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        self.rng = Random(seed)
        self._pooled_rng = Random(f"pooled {seed}")
        """Not rng: other worlds do not depend on pooled requests."""
        self.more_rng = Random(f"more {seed}")
        """The same for adapters and quotes."""
        self._picture_rng = Random(f"pictures {seed}")
        self.log = log
        self.setup = Setup.draw(self.rng, seed)
        self.setup.draw_pooled(seed)
        self.setup.draw_more(self.more_rng, seed)
        self.setup.draw_picture_sizes(self._picture_rng, seed)
        self.covered: Counter[str] = Counter()
        self.now_s = 0.0
        self.tick = 0
        self.asks: list[Ask] = []
        self.frontends: dict[int, Frontend] = {}
        self.names: dict[tuple[int, int], Ask] = {}  # all ids that this backend has seen
        self._num_epochs = 0
        self._num_ids = 0
        self._num_faults = 0
        self.may_fail = True
        self._device_rate = 0.5
        self.judge = Judge(self)
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
            self.judge.judge_end()
        finally:
            self.backend.board.close()

    def _run_dry(self) -> None:
        """Cause no more trouble. Each tick runs steps, and all requests must end within the work that is left."""
        self.may_fail = False
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
        if self.rng.random() < _SUSPEND_RATE:  # the machine was suspended
            self.now_s += 100
            self.covered["suspended"] += 1
        if self.log is not None:
            self.log(f"{self.tick}: {self.now_s:.2f} s")
        happen()
        self._send()
        if not self.may_fail or self.rng.random() < self.setup.rates["compile"]:
            self.covered["grammars compiled"] += self.backend.compile_pool.advance()
        if not self.may_fail or self.rng.random() < self.setup.rates["compile"]:
            self.backend.executor.late_masks.advance_one()
        if not self.may_fail or self._picture_rng.random() < 0.25:
            self.backend.tower.advance()
        self._run_device()
        if not self.may_fail or self.rng.random() >= self.setup.rates["nap"]:
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
        self.judge.judge_turn()
        if backend.is_draining and backend.engine._is_drained():
            self.covered["drained"] += 1
            self._restart()

    # Events

    def _happen(self) -> None:
        rng, rates = self.rng, self.setup.rates
        if rng.random() < rates["submit"]:
            burst = rng.randint(2, 6) if rng.random() < rates["burst"] else 1
            for _ in range(burst):
                self._submit(self._draw_ask())
        if self._pooled_rng.random() < self.setup.group_rate:
            self._submit_inputs()
        if self._pooled_rng.random() < self.setup.group_rate:
            self._hang_up()
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
        """A new request, perhaps equal to one that is running."""
        like = None
        if self.rng.random() < self.setup.rates["alike"]:
            models = [ask for ask in self.asks if ask.ended is None] or self.asks[-4:]
            like = self.rng.choice(models) if models else None
        ask = self.setup.draw_ask(self.rng, len(self.asks), like, self.setup.draw_adapter(self.more_rng, like))
        if self._pooled_rng.random() < self.setup.pooled_rate:
            self.setup.make_pooled(ask)
        elif self.more_rng.random() < self.setup.quote_rate:
            ask.is_question = self.more_rng.random() < 0.5 and not ask.is_embedded
            ask.refuses_late = not ask.is_question
        self.setup.draw_pictures(self._picture_rng, ask, like)
        if self.rng.random() < self.setup.rates["engine_error"]:
            ask.engine_error = self.rng.choice(ENGINE_ERRORS)
        return ask

    def _submit_inputs(self) -> None:
        """Submit a client's request for several vectors."""
        frontend = self._pooled_rng.choice(list(self.frontends.values()))
        for ask in self.setup.draw_inputs(self._pooled_rng, len(self.asks), group=1 + len(self.asks)):
            self._submit(ask, frontend)
        self.covered["requests with several inputs"] += 1

    def _hang_up(self) -> None:
        """Cancel all that is left of one request with several inputs."""
        frontend = self._pooled_rng.choice(list(self.frontends.values()))
        groups = sorted({ask.group for ask in frontend.asks.values() if ask.group})
        if groups:
            group = self._pooled_rng.choice(groups)
            left = [request_id for request_id, ask in frontend.asks.items() if ask.group == group]
            self.covered["inputs dropped halfway"] += len(left) < sum(ask.group == group for ask in self.asks)
            for request_id in left:
                frontend.cancel(request_id)

    def _submit(self, ask: Ask, frontend: Frontend | None = None) -> None:
        """Without a frontend to any of them."""
        frontend = frontend or self.rng.choice(list(self.frontends.values()))
        self.asks.append(ask)
        ask.submitted_ns = 1 + int(1e9 * self.now_s)
        self._note(
            f"{ask} of {ask.prompt} {ask.sampling} stop {ask.stop_ids} salt {ask.salt!r} "
            f"tenant {ask.tenant!r} adapter {ask.adapter!r} quote {ask.is_question} {ask.refuses_late} "
            f"share {ask.may_share} timeout {ask.timeout_ms} {ask.constraints} scored {ask.num_prompt_logprobs} "
            f"{'embedded ' if ask.is_embedded else ''}pictures {ask.spans} "
            f"expects {ask.expected} {ask.finish.name}"
        )
        self._send_ask(frontend, ask, self._num_ids, ask.timeout_ms)
        self._num_ids += 1

    def _send_ask(self, frontend: Frontend, ask: Ask, request_id: int, timeout_ms: int) -> None:
        self.names[frontend.epoch, request_id] = ask
        frontend.submit(ask, request_id, timeout_ms)

    def _submit_badly(self) -> None:
        ask = self._draw_ask()
        if self.rng.random() < 0.5:
            ask.prompt = [0] * (self.setup.context + 1)
        else:
            ask.prompt[self.rng.randrange(len(ask.prompt))] = self.rng.choice((-1, self.setup.model.vocab_size))
            ask.is_embedded = False
        ask.finish, ask.expected, ask.spans = Finish.REJECTED, [], ()
        self._submit(ask)

    def _cancel_one(self) -> None:
        frontend = self.rng.choice(list(self.frontends.values()))
        if frontend.asks and self.rng.random() < 0.9:
            started = [i for i in frontend.asks if self._is_just_planned(frontend.epoch, i)]
            request_id = self.rng.choice(started if started and self.rng.random() < 0.5 else list(frontend.asks))
            frontend.cancel(request_id)
            if self.rng.random() < 0.2:
                frontend.cancel(request_id)
        else:  # an old id, or one that was never used
            frontend.cancel(self.rng.randrange(self._num_ids + 3))

    def _is_just_planned(self, epoch: int, request_id: int) -> bool:
        """Its first step, or the first since its preemption, is in the last plan."""
        found = self.backend.requests.table.find(epoch, request_id)
        return found is not None and found.sequence in self.backend.scheduler.started

    def _cancel_alike(self) -> None:
        """Cancel all requests with one prompt, and perhaps submit a new one at that moment."""
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
        """Some of what it sent may still arrive, then its death. A new frontend replaces it."""
        epoch = self.rng.choice(list(self.frontends))
        frontend = self.frontends.pop(epoch)
        self._note(f"frontend {epoch} dies with {[str(a) for a in frontend.asks.values()]}")
        for ask in frontend.asks.values():
            ask.ended = Finish.CANCELLED
        for event in list(frontend.wire)[: self.rng.randrange(len(frontend.wire) + 1)]:
            self.backend.link.arrivals.append(event)
        self.backend.link.arrivals.append(FrontendDeath(epoch))
        self.covered["frontend deaths"] += 1
        self._welcome()

    def _restart(self) -> None:
        """The backend dies. Some of its last messages are read, then all open requests go to the next backend."""
        self._note("the backend dies, and another comes")
        self.covered["backend restarts"] += 1
        self.covered["killed in the tower"] += self.backend.tower.encoding is not None
        self.backend.board.close()
        self.backend = Backend(self)
        self.names.clear()
        for old in list(self.frontends.values()):
            for _ in range(self.rng.randrange(len(old.inbox) + 1)):
                old.read()
            del self.frontends[old.epoch]
            new = self._welcome()
            for request_id, ask in old.asks.items():
                self.covered["resumed"] += bool(ask.got)
                ask.admitted_ns = ask.submitted_ns
                self._send_ask(new, ask, request_id, ask.timeout_ms)

    def _send(self) -> None:
        """Deliver what frontends sent, in the order of each."""
        for frontend in self.frontends.values():
            slow = self.may_fail and self.rng.random() < self.setup.rates["slow wire"]
            count = self.rng.randrange(len(frontend.wire) + 1) if slow else len(frontend.wire)
            for _ in range(count):
                self.backend.link.arrivals.append(frontend.wire.popleft())

    def _run_device(self) -> None:
        if not self.may_fail:
            count = 3
        else:
            if self.setup.device_speed == "changing" and self.rng.random() < 0.1:
                self._device_rate = self.rng.choice((0.2, 0.7, 0.9))
            elif self.setup.device_speed != "changing":
                self._device_rate = {"slow": 0.45, "even": 0.75, "fast": 0.9}[self.setup.device_speed]
            count = 0
            while self.rng.random() < self._device_rate:
                count += 1
        while count and self.backend.executor.advance():
            count -= 1

    def advance_device(self) -> None:
        """Let the device advance in the middle of a turn."""
        while self.rng.random() < 0.2 and self.backend.executor.advance():
            pass

    def breaks_down(self, kind: str, subscriber: Subscriber) -> bool:
        """Whether the engine fails on the request now."""
        ask = self.names[subscriber.frontend, subscriber.request_id]
        return ask.engine_error == kind and self.may_fail and self.rng.random() < 0.5

    def break_down(self, kind: str, sequences: list[Sequence]) -> None:
        """Fail on one of the sequences. Only a sequence that is alone may be blamed: the engine cannot know which of
        several caused the error."""
        if any(self.breaks_down(kind, subscriber) for sequence in sequences for subscriber in sequence.subscribers):
            self.covered[f"engine error: {kind}"] += 1
            if len(sequences) == 1:
                self.backend.broken.add(sequences[0])
            raise PlantedFault(kind)

    def break_down_request(self, kind: str, subscriber: Subscriber) -> None:
        if self.breaks_down(kind, subscriber):
            self.backend.broken.add((subscriber.frontend, subscriber.request_id))
            raise PlantedFault(kind)

    def draw_fault(self, sequences: list[Sequence]) -> Fault | None:
        """The fault of the next step with these sequences, if any."""
        try:
            self.break_down("step", sequences)
        except PlantedFault:
            return Fault(self.rng.choice(("raise", "raise late", "raise at wait", "miscount")), 0, 0)
        num_rows = len(sequences)
        if num_rows == 0 or not self.may_fail or self.rng.random() >= self.setup.rates["fault"]:
            return None
        self._num_faults += 1
        fault = Fault(self.rng.choice(_FAULTS), self.rng.randrange(num_rows), self._num_faults)
        self.covered[f"fault: {fault.kind}"] += 1
        self._note(f"{fault}")
        return fault

    def _note(self, text: str) -> None:
        if self.log is not None:
            self.log(text)

    def ask_of(self, epoch: int, request_id: int) -> Ask:
        return self.names[epoch, request_id]


def run_seed(seed: int, log: Callable[[str], None] | None = None) -> Counter[str]:
    """Run a seed and return how often each thing occurred. Raises Violation, or what the engine raises."""
    world = World(seed, log)
    world.run()
    return world.covered
