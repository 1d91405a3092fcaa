"""The accounts of tenants, and whose turn it is, against a model that looks at everything."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.backend.forward_pass import SamplingParams
from penstock.backend.scheduling.step_plan import share_out
from penstock.backend.scheduling.tenants import Tenants
from penstock.backend.scheduling.wait_queue import Passed, WaitQueue
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber
from penstock.backend.sequences.tenant_account import TenantAccount

NAMES = (b"a", b"b", b"c")


class TurnsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tenants = Tenants()
        self.wait_queue = WaitQueue(self.tenants)
        self.queued: list[Sequence] = []
        self.passed: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_made = 0

    @rule(
        name=st.sampled_from(NAMES),
        weight=st.sampled_from((0.5, 1.0, 4.0)),
        count=st.sampled_from((1, 1, 5)),
        goes_first=st.sampled_from((False, False, True)),
    )
    def arrive(self, name: bytes, weight: float, count: int, goes_first: bool) -> None:
        for _ in range(count):
            subscriber = Subscriber(1, self.num_made, 10, frozenset(), 1, 0.0)
            sequence = Sequence(subscriber, bytes(4), 1, SamplingParams(), tenant=name, weight=weight)
            sequence.order, sequence.goes_first = self.num_made, goes_first
            self.num_made += 1
            sequence.account = self.tenants.open(name, weight)
            others = [other.account.service for other in self.queued + self.passed]
            was_waiting = any(other.account is sequence.account for other in self.queued + self.passed)
            before = sequence.account.service
            self.put(sequence)
            if was_waiting:
                assert sequence.account.service == before
            else:
                floor = min(others, default=self.tenants.highest_service)
                assert sequence.account.service == max(before, floor)

    def put(self, sequence: Sequence) -> None:
        self.wait_queue.put(sequence)
        self.queued.append(sequence)

    @precondition(lambda self: self.queued)
    @rule(is_passed=st.sampled_from((False, False, True)))
    def take(self, is_passed: bool) -> None:
        head = self.wait_queue.head()
        assert head is not None
        if firsts := [other.turn for other in self.queued if other.goes_first]:
            assert head.goes_first
            assert head.turn == min(firsts)
        else:
            assert head.account.service == min(other.account.service for other in self.queued)
            assert head.turn == min(other.turn for other in self.queued if other.account is head.account)
        self.queued.remove(head)
        if is_passed and self.wait_queue.can_pass(head):
            self.wait_queue.pass_over(head, Passed(1, 1, 1))
            self.passed.append(head)
        else:
            self.wait_queue.take(head)
            self.start(head)

    @precondition(lambda self: self.passed)
    @rule(data=st.data())
    def take_passed(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.passed))
        assert list(self.wait_queue.passed_before(sequence)) == self.passed[: self.passed.index(sequence)]
        self.wait_queue.take(sequence)
        self.passed.remove(sequence)
        self.start(sequence)

    def start(self, sequence: Sequence) -> None:
        sequence.goes_first = False
        self.running.append(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), cost=st.integers(1, 50))
    def compute(self, data: st.DataObject, cost: int) -> None:
        account = data.draw(st.sampled_from(self.running)).account
        before = account.service
        self.tenants.charge(account, cost)
        assert account.service == before + cost / account.weight

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.put(sequence)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        everyone = self.queued + self.passed + self.running
        if not everyone:
            return
        sequence = data.draw(st.sampled_from(everyone))
        sequence.ended = True
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.wait_queue.forget(sequence)
            (self.queued if sequence in self.queued else self.passed).remove(sequence)
        self.tenants.close(sequence.account)

    @rule()
    def forget_idle(self) -> None:
        """Only tenants without sequences are forgotten, and only those that would be lifted anyway."""
        floor = self.wait_queue.floor()
        in_use = {sequence.account for sequence in self.queued + self.passed + self.running}
        self.tenants.forget_idle(floor)
        for account in self.tenants._accounts.values():
            assert account in in_use or account.service > floor
        assert in_use <= set(self.tenants._accounts.values())

    @invariant()
    def it_is_sound(self) -> None:
        self.wait_queue.check_integrity()
        self.tenants.check_integrity(self.queued + self.passed + self.running)
        assert len(self.wait_queue) == len(self.queued) + len(self.passed)
        assert set(self.wait_queue.sequences()) == {*self.queued, *self.passed}


TestTurnsMachine = TurnsMachine.TestCase
TestTurnsMachine.settings = settings(max_examples=60, stateful_step_count=40)


@given(
    needs=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    budget=st.integers(1, 200),
    someone_waits=st.booleans(),
    data=st.data(),
)
def test_a_steps_tokens_are_all_used_and_the_first_and_the_shortest_get_their_part(
    needs: list[int], budget: int, someone_waits: bool, data: st.DataObject
) -> None:
    num_of_first = data.draw(st.integers(1, len(needs)))
    grants, left = share_out(needs, budget, num_of_first_tenant=num_of_first, someone_waits=someone_waits)
    assert all(0 <= grant <= need for grant, need in zip(grants, needs, strict=True))
    assert sum(grants) + left == budget
    if sum(needs) <= budget:
        assert grants == needs
        return
    assert left >= (budget // 8 if someone_waits else 0)
    assert grants[0] >= min(needs[0], budget - max(1, budget // 4) if budget > 1 else 1)
    shortest = min(needs[:num_of_first])
    three_quarters = budget - max(1, budget // 4)
    # The prompt in which the first three quarters end may have less left than the shortest one.
    rest = next(end for end in accumulate(needs) if end > three_quarters) - three_quarters
    if shortest + (rest if rest <= shortest else 0) <= budget // 8:
        assert grants[needs.index(shortest)] == shortest


def test_group_keeps_its_place_when_its_last_sequence_is_cancelled() -> None:
    account, group = TenantAccount(b"", 1.0), (1, 1)
    assert [account.next_round(group) for _ in range(3)] == [1, 2, 3]
    account.leave_round(group, 3, has_started=False)
    assert account.next_round(group) == 3  # not 1, before its own second sequence
    for number in (1, 2, 3):
        account.leave_round(group, number, has_started=True)
        account.leave_round(group, number, has_started=True)  # it was preempted, and has started again
    assert account._rounds == {}
    assert account.next_round(group) == account.next_round(None) == 4
