"""Checkpoints: states of sequences after some of their full pages, for passes that keep a state for each slot.

A prefix of such a pass is its pages and the state after the last of them. A state is as large as the KV of a thousand
tokens or more, so few are kept: where a prompt's full pages end, where a prompt parts from another that is cached, and
where another sequence waits to part from a running one. Beside these a running sequence has one that moves on with it,
from which it goes on when it is preempted, and its next turn when it has ended.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections import Counter
from typing import TYPE_CHECKING

from penstock.backend.kv_cache.page_index import IndexedPage
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.sequences.sequence import KvState, Sequence

if TYPE_CHECKING:
    from collections.abc import Iterable

SPACING_TOKENS = 64
"""A checkpoint is worth the step that ends there, and its copy, if it spares at least so many tokens."""
_PROMPT_SPACINGS = 32
"""The checkpoint that moves on is this many times rarer in a long prompt, whose steps compute hundreds of tokens."""


class StateCheckpoints:
    """Which state is in which place of the pass. Owned by the running sequences; not shared between threads.

    Places are the pages of a pool of their own: idle ones are evicted like pages, and may be saved to the host. A state
    is found by the hash of the page before it. It is saved when a step has ended and restored before one begins, so a
    step may save to a place that it restores from. Other sequences find it when the step that saved it is applied.
    """

    def __init__(
        self, pool: PagePool, page_size_tokens: int, spacing_tokens: int = SPACING_TOKENS, state_bytes: int = 0
    ) -> None:
        """state_bytes: see `num_bytes`."""
        self.pool = pool
        self._state_bytes = state_bytes
        self._page_size = page_size_tokens
        self.spacing_pages = -(-spacing_tokens // page_size_tokens)
        self._spacing = self.spacing_pages * page_size_tokens
        self._movers: set[Sequence] = set()
        """Sequences that have used a place for a checkpoint that moves on."""

    @property
    def num_bytes(self) -> int:
        """Memory of the states that can be found, or that a step saves or restores."""
        return (self.pool.num_held + self.pool.num_idle) * self._state_bytes

    def num_pages_before(self, page_hashes: list[bytes]) -> int:
        """Number of the longest beginning of these pages after which the state is known."""
        host = self.pool.host_offload
        for num_pages in range(len(page_hashes) if self.pool.num_pages else 0, 0, -1):
            page_hash = page_hashes[num_pages - 1]
            if self.pool.find(page_hash) is not None or (self.pool.num_available and host.contains(page_hash)):
                return num_pages
        return 0

    def is_coming(self, sequence: Sequence, num_pages: int) -> bool:
        """Whether a running sequence will keep the state after so many pages, or still can."""
        num_tokens = num_pages * self._page_size
        known_end = max(sequence.num_computed, sequence.kv.drafts_end)
        return bool(self.pool.num_pages) and (num_tokens > known_end or num_tokens in sequence.kv.saving)

    def expect(self, sequence: Sequence, num_pages: int) -> None:
        """Let a running sequence keep a state that `is_coming`."""
        kv, num_tokens = sequence.kv, num_pages * self._page_size
        if num_tokens not in kv.saving and num_tokens not in kv.kept_borders:
            insort(kv.kept_borders, num_tokens)
            kv.next_border = min(kv.next_border, num_tokens)

    def start(self, sequence: Sequence, num_pages: int, num_shared_pages: int) -> list[tuple[int, int]]:
        """Begin after num_pages pages. Returns (host place, place) to restore from the host.

        num_shared_pages: where the sequence parts from another one; 0 if it does not.
        """
        restores = []
        if num_pages:
            page_hash = sequence.kv.page_hashes[num_pages - 1]
            if (place := self.pool.find(page_hash)) is not None:
                self.pool.hold(place)
                self.pool.mark_for_offload([page_hash])
            else:
                restores = [(self.pool.host_offload.restore(page_hash), self.pool.allocate(1)[0])]
                place = restores[0][1]
                self.pool.pin(place)
                sequence.kv.saving[num_pages * self._page_size] = place, True
            sequence.kv.state_place = place
        self._want(sequence, num_pages * self._page_size, [num_shared_pages * self._page_size])
        return restores

    def _want(self, sequence: Sequence, num_computed: int, borders: Iterable[int]) -> None:
        """Let the sequence, which goes on after num_computed tokens, keep the states at these borders and at its
        prompt's last one, if they are far enough apart."""
        if not self.pool.num_pages:
            return
        last, kept = num_computed, []
        for border in sorted([*borders, (len(sequence.tokens) - 1) // self._page_size * self._page_size]):
            if border - last >= self._spacing:
                kept.append(border)
                last = border
        sequence.kv.kept_borders = kept
        self._set_next_border(sequence.kv, num_computed)

    def _set_next_border(self, kv: KvState, num_computed: int) -> None:
        spacing = self._spacing * (_PROMPT_SPACINGS if kv.kept_borders else 1)
        kv.next_border = min([num_computed + spacing, *kv.kept_borders[:1]])

    def move(self, sequences: list[Sequence], ends: list[int]) -> dict[Sequence, tuple[int, int]]:
        """Return (slot, place) of the states that a step keeps, whose rows end after so many tokens."""
        due = [sequence for sequence, end in zip(sequences, ends, strict=True) if end == sequence.kv.next_border]
        return {sequence: found for sequence in due if (found := self._save(sequence, sequence.kv)) is not None}

    def _save(self, sequence: Sequence, kv: KvState) -> tuple[int, int] | None:
        num_tokens, is_kept = kv.next_border, kv.next_border in kv.kept_borders
        if is_kept:
            kv.kept_borders.remove(num_tokens)
        self._set_next_border(kv, num_tokens)
        if not is_kept:
            # Checkpoints that move on take at most half of the places, because the others serve more sequences.
            if sequence not in self._movers and 2 * len(self._movers) + 2 > self.pool.num_pages:
                return None
            self._movers.add(sequence)
            self._drop_passing(kv)
        if kv.is_suspect or not self.pool.num_available or sequence.slot is None:
            return None
        (place,) = self.pool.allocate(1)
        kv.saving[num_tokens] = place, is_kept
        return sequence.slot, place

    def _drop_passing(self, kv: KvState) -> None:
        if kv.passing_hash and not self.pool.is_reused(kv.passing_hash):
            self.pool.discard([kv.passing_hash])
        kv.passing_hash = b""

    def take_restores(self, sequences: list[Sequence]) -> dict[Sequence, tuple[int, int]]:
        """Return (place, slot) for those of the step's new or rewound sequences that go on from a checkpoint."""
        restores = {}
        for sequence in sequences:
            place = sequence.kv.state_place
            if place >= 0 and sequence.slot is not None:
                restores[sequence] = place, sequence.slot
                sequence.kv.state_place = -1
                self.pool.release([place])
        return restores

    def note_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the states that applied steps have kept."""
        kv = sequence.kv
        for border in [border for border in kv.saving if border <= num_tokens]:
            place, is_kept = kv.saving.pop(border)
            if not kv.is_suspect:
                index = border // self._page_size - 1
                page_hash, parent_hash = kv.page_hashes[index], kv.page_hashes[index - 1] if index else sequence.salt
                entry = IndexedPage(page_hash, parent_hash, sequence.salt, sequence.tenant, sequence.weight)
                self.pool.index_page(place, b"", entry)
                if not is_kept:
                    self._drop_passing(kv)
                    kv.passing_hash = page_hash
            self.pool.release([place])

    def leave(self, sequences: Iterable[Sequence]) -> None:
        """Leave the sequences' states to the next backend, and those that are kept from now on."""
        hashes = (page_hash for sequence in sequences for page_hash in sequence.kv.page_hashes)
        self.pool.leave([page_hash for page_hash in hashes if self.pool.find(page_hash) is not None])

    def go_back(self, sequence: Sequence, num_computed: int) -> int:
        """Return the number of pages after which the sequence can go on: not more than its num_computed tokens fill."""
        kv = sequence.kv
        borders = [*kv.kept_borders, *(border for border, (_, is_kept) in kv.saving.items() if is_kept)]
        self._release(kv)
        num_pages, place = min(num_computed // self._page_size, len(kv.page_hashes)), None
        while num_pages and (place := self.pool.find(kv.page_hashes[num_pages - 1])) is None:
            num_pages -= 1
        if place is not None:
            self.pool.hold(place)
            kv.state_place = place
        self._want(sequence, num_pages * self._page_size, borders)
        return num_pages

    def stop(self, sequence: Sequence) -> None:
        """The sequence stops running. Its checkpoints stay until others need their places."""
        kv = sequence.kv
        self._release(kv)
        self._movers.discard(sequence)
        kv.passing_hash, kv.kept_borders, kv.next_border = b"", [], sys.maxsize

    def _release(self, kv: KvState) -> None:
        """Release what no step in flight may be applied to, or read, any more."""
        places = [place for place, _ in kv.saving.values()]
        kv.saving.clear()
        kv.drafts_end = 0
        if kv.state_place >= 0:
            places.append(kv.state_place)
            kv.state_place = -1
        self.pool.release(places)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raises RuntimeError unless exactly the running sequences hold places."""
        self.pool.check_integrity()
        held = Counter[int]()
        for sequence in running:
            held.update(place for place, _ in sequence.kv.saving.values())
            held.update([sequence.kv.state_place] * (sequence.kv.state_place >= 0))
        if len(held) != self.pool.num_held or any(self.pool.num_holders(place) != held[place] for place in held):
            raise RuntimeError(f"{self.pool.num_held} checkpoints are held, running sequences have {len(held)}")
        if not self._movers <= set(running):
            raise RuntimeError("a sequence that does not run has a checkpoint that moves on")
