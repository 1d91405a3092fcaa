"""The wait queue against a sorted list: order of rank, parking, and sequences that end while they wait."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.backend.forward_pass import SamplingParams
from penstock.backend.scheduling.tenants import Tenants
from penstock.backend.scheduling.wait_queue import WaitQueue
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber

KEYS = [bytes([number]) * 16 for number in range(3)]


def add_tenant(tenants: Tenants, wait_queue: WaitQueue, number: int) -> Sequence:
    """A waiting sequence of a new tenant."""
    key = number.to_bytes(2)
    sequence = Sequence(Subscriber(1, number, 10, frozenset(), 1, 0.0), bytes(4), 1, SamplingParams(), tenant=key)
    sequence.order = number
    sequence.account = tenants.open(key, 1.0)
    wait_queue.put(sequence)
    return sequence


def test_tenant_that_waits_is_not_overtaken_for_ever_by_new_tenants() -> None:
    tenants = Tenants()
    wait_queue = WaitQueue(tenants)
    arrived = [add_tenant(tenants, wait_queue, number) for number in range(3)]
    served = []
    for number in range(3, 20):  # as many arrive as are served
        arrived.append(add_tenant(tenants, wait_queue, number))
        head = wait_queue.head()
        assert head is not None
        wait_queue.take(head)
        tenants.charge(head.account, 10.0)
        head.ended = True
        tenants.close(head.account)
        served.append(head)
    assert served == arrived[: len(served)]


def test_new_tenant_goes_before_one_that_has_all_slots() -> None:
    tenants = Tenants()
    wait_queue = WaitQueue(tenants)
    flood = add_tenant(tenants, wait_queue, 0)
    flood.account.num_running = 8
    newcomer = add_tenant(tenants, wait_queue, 1)
    assert wait_queue.head() is newcomer


def test_tenants_that_come_and_go_behind_a_head_that_cannot_start_are_forgotten() -> None:
    tenants = Tenants()
    wait_queue = WaitQueue(tenants)
    head = add_tenant(tenants, wait_queue, 0)
    for number in range(1, 1000):
        sequence = add_tenant(tenants, wait_queue, number)
        sequence.ended = True
        wait_queue.forget(sequence)
        tenants.close(sequence.account)
        assert wait_queue.num_turns <= 67
        assert wait_queue.head() is head
        wait_queue.check_integrity()


def test_place_among_several_tenants_is_that_in_the_order_of_their_service() -> None:
    tenants = Tenants()
    wait_queue = WaitQueue(tenants)
    for number in range(60):
        key = b"abc"[number % 3 :][:1] if number < 30 else b"a"
        subscriber = Subscriber(1, number, 10, frozenset(), 1, 0.0)
        sequence = Sequence(subscriber, bytes(4), 1, SamplingParams(), tenant=key)
        sequence.order, sequence.account = number, tenants.open(key, 4.0 if key == b"c" else 1.0)
        wait_queue.put(sequence)
    order = wait_queue.next_sequences(60)
    assert len(set(order)) == 60
    assert [sequence.tenant for sequence in order[:10]].count(b"c") >= 5, "it has four times the weight"
    rates = wait_queue.tenants()
    for place, sequence in enumerate(order):
        num_before = wait_queue.num_before(sequence, sequence.turn, sequence.account, rates)
        assert abs(num_before - place) <= 4


class WaitQueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.wait_queue = WaitQueue(Tenants())
        self.num_made = 0
        self.queue: list[Sequence] = []
        self.parked: dict[bytes, list[Sequence]] = {}
        self.running: list[Sequence] = []
        self.step = 0
        self.deadlines: list[tuple[int, Sequence]] = []

    def make(self, rank: float) -> Sequence:
        subscriber = Subscriber(1, self.num_made, 10, frozenset(), 1, 0.0)
        sequence = Sequence(subscriber, bytes(4), 1, SamplingParams(), rank=rank)
        sequence.order = self.num_made
        self.num_made += 1
        return sequence

    def put(self, sequence: Sequence) -> None:
        self.wait_queue.put(sequence)
        self.queue.append(sequence)
        self.queue.sort(key=lambda waiting: waiting.turn)

    @rule(rank=st.sampled_from([0.0, 0.0, -3.0, 2.5]), count=st.sampled_from([1, 1, 3, 90]))
    def arrive(self, rank: float, count: int) -> None:
        for _ in range(count):
            self.put(self.make(rank))

    @precondition(lambda self: self.queue)
    @rule()
    def take(self) -> None:
        assert self.wait_queue.head() is self.queue[0]
        self.wait_queue.take(self.queue[0])
        self.running.append(self.queue.pop(0))

    @precondition(lambda self: self.queue)
    @rule(key=st.sampled_from(KEYS))
    def park(self, key: bytes) -> None:
        assert self.wait_queue.head() is self.queue[0]
        self.wait_queue.take(self.queue[0])
        self.wait_queue.park(self.queue[0], key, self.step + 3)
        self.deadlines.append((self.step + 3, self.queue[0]))
        self.parked.setdefault(key, []).append(self.queue.pop(0))

    @rule(steps=st.integers(1, 4))
    def time_passes(self, steps: int) -> None:
        """A sequence that was unparked and parked again meanwhile is unparked at its first deadline."""
        self.step += steps
        self.wait_queue.unpark_overdue(self.step)
        due = {sequence for deadline, sequence in self.deadlines if deadline <= self.step}
        self.deadlines = [entry for entry in self.deadlines if entry[0] > self.step]
        for key, parked in list(self.parked.items()):
            self.queue += [sequence for sequence in parked if sequence in due]
            self.parked[key] = [sequence for sequence in parked if sequence not in due]
            if not self.parked[key]:
                del self.parked[key]
        self.queue.sort(key=lambda waiting: waiting.turn)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def unpark(self, keys: list[bytes]) -> None:
        self.wait_queue.unpark(keys)
        for key in keys:
            self.queue += self.parked.pop(key, [])
        self.queue.sort(key=lambda waiting: waiting.turn)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.put(sequence)

    @rule(data=st.data(), count=st.sampled_from([1, 1, 2, 80]))
    def end(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            waiting = self.queue + [sequence for parked in self.parked.values() for sequence in parked]
            if not waiting:
                return
            self.forget(data.draw(st.sampled_from(waiting)) if count == 1 else waiting[len(waiting) // 2])

    def forget(self, sequence: Sequence) -> None:
        sequence.ended = True
        self.wait_queue.forget(sequence)
        if sequence in self.queue:
            self.queue.remove(sequence)
            return
        for key, parked in list(self.parked.items()):
            if sequence in parked:
                parked.remove(sequence)
                if not parked:
                    del self.parked[key]

    @invariant()
    def each_sequence_is_present_once(self) -> None:
        num_parked = sum(len(parked) for parked in self.parked.values())
        assert len(self.wait_queue) == len(self.queue) + num_parked
        assert self.wait_queue.head() is (self.queue[0] if self.queue else None)
        assert self.wait_queue.parked_keys() == self.parked.keys()
        ahead = self.wait_queue.parked()
        assert self.wait_queue.next_sequences(num_parked + 5) == ahead + self.queue[:5]
        tenants = self.wait_queue.tenants()
        for place, sequence in enumerate(self.queue[:5]):
            num_before = self.wait_queue.num_before(sequence, sequence.turn, sequence.account, tenants)
            assert num_before == num_parked + place
        present = self.wait_queue.sequences()
        assert len(present) == len(self.wait_queue)
        assert set(present) == {*self.queue, *(sequence for parked in self.parked.values() for sequence in parked)}

    def teardown(self) -> None:
        self.wait_queue.unpark(KEYS)
        left = self.queue + [sequence for parked in self.parked.values() for sequence in parked]
        for expected in sorted(left, key=lambda waiting: waiting.turn):
            assert self.wait_queue.head() is expected
            self.wait_queue.take(expected)
        assert len(self.wait_queue) == 0


TestWaitQueueMachine = WaitQueueMachine.TestCase
TestWaitQueueMachine.settings = settings(max_examples=100, stateful_step_count=40)
