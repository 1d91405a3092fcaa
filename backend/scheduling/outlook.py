"""The scheduler's state from which quotes predict what runs next."""

from __future__ import annotations

import sys
from typing import NamedTuple

from penstock.backend.scheduling.running import RunningSequences
from penstock.backend.scheduling.tenants import Tenants
from penstock.backend.scheduling.wait_queue import WaitQueue
from penstock.backend.sequences.sequence import Sequence

_MAX_MODELLED = 64
"""Waiting sequences whose start is modelled. Those behind are assumed to start at the same rate."""


class Place(NamedTuple):
    num_ahead: int
    """Waiting sequences that are expected to start before it."""
    num_cached: int
    """Cached tokens of its prompt."""


class Outlook:
    """Made once for all quotes until the next change. Its lists are copies; their sequences are not."""

    def __init__(self, running: RunningSequences, waiting: WaitQueue, tenants: Tenants, max_batch_tokens: int) -> None:
        self.running = list(running.sequences)
        self.waiting = waiting.next_sequences(_MAX_MODELLED)
        """The first waiting sequences, in order."""
        self.num_hidden = len(waiting) - len(self.waiting)
        """The number of waiting sequences behind those."""
        self.num_slots = running.max_running
        self.num_pages = running.num_pages
        self.groups = running.groups
        self.max_batch_tokens = max_batch_tokens
        self._prefix_cache = running.prefix_cache
        self._waiting = waiting
        self._tenants = tenants
        self._waiting_tenants = waiting.tenants()

    def place_of(self, sequence: Sequence) -> Place:
        """The place of a sequence that waits, runs, or has not been added."""
        prefix = self._prefix_cache.find(sequence)
        num_cached = prefix.num_full_pages * self.groups.page_size_tokens + prefix.num_copied_tokens
        if sequence.slot is not None:
            return Place(0, num_cached)
        account, turn = sequence.account, sequence.turn
        if sequence.order < 0:
            account = self._tenants.find(sequence.tenant, sequence.weight)
            turn = sequence.rank, sequence.admitted_ns, account.round + 1, sys.maxsize
        return Place(self._waiting.num_before(sequence, turn, account, self._waiting_tenants), num_cached)
