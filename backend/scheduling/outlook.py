"""The running sequences, and those that wait before a certain one: the scheduler's state as a quote needs it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from penstock.backend.scheduling.tenants import DECODE_COST, PREFILL_COST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.backend.kv_cache.kv_groups import KvGroups
    from penstock.backend.sequences.sequence import Sequence
    from penstock.backend.sequences.tenant_account import TenantAccount

    Turn: TypeAlias = tuple[float, int, int, int]


@dataclass(frozen=True, slots=True)
class Outlook:
    """Copies of the scheduler's tables; the sequences are not copied."""

    running: list[Sequence]
    waiting: list[Sequence]
    """Sequences that are expected to start before the sequence, in this order."""
    num_cached: int
    """Cached tokens of the sequence."""
    num_slots: int
    num_pages: int
    groups: KvGroups
    max_batch_tokens: int


def those_before(newcomer: Sequence, turn: Turn, account: TenantAccount, waiting: Iterable[Sequence]) -> list[Sequence]:
    """Return the waiting sequences that start before one with this turn, in order.

    Tenants take turns by the service that they will have received. Each sequence is charged when it starts, for all
    tokens that it may generate, or half of them if it may stop. Preemption for a tenant under its share is not
    predicted.
    """
    queues: dict[TenantAccount, list[tuple[bool, Turn, int, Sequence]]] = {}
    for number, sequence in enumerate(waiting):
        if sequence is not newcomer:
            queues.setdefault(sequence.account, []).append((not sequence.goes_first, sequence.turn, number, sequence))
    queues.setdefault(account, []).append((True, turn, -1, newcomer))
    first: list[tuple[Turn, int, Sequence]] = []
    for queue in queues.values():
        queue.sort(reverse=True)
        while queue and not queue[-1][0]:
            _, its_turn, number, sequence = queue.pop()
            first.append((its_turn, number, sequence))
    before = [sequence for _, _, sequence in sorted(first)]
    services = [(owner.service, number, owner) for number, owner in enumerate(queues) if queues[owner]]
    heapq.heapify(services)
    while True:
        service, number, owner = services[0]
        sequence = queues[owner].pop()[-1]
        if sequence is newcomer:
            return before
        before.append(sequence)
        if queues[owner]:
            heapq.heapreplace(services, (service + _cost(sequence) / owner.weight, number, owner))
        else:
            heapq.heappop(services)


def _cost(sequence: Sequence) -> float:
    num_known = len(sequence.tokens)
    num_to_generate = (sequence.max_total_tokens - num_known) / (2 if sequence.common_stop_ids else 1)
    return PREFILL_COST * num_known + DECODE_COST * num_to_generate
