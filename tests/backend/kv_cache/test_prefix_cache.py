"""The prefix cache against a model of what each page holds: sequences start, compute, wait and stop in any order.

What the engine does with them is in test_coalescing.py and the simulation.
"""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.backend.forward_pass import SamplingParams
from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.kv_cache.page_hash import extend_page_hashes, partial_page_hash
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.kv_cache.prefix_cache import Prefix, PrefixCache, count_common_tokens
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber

TOKENS = st.lists(st.integers(0, 3), max_size=40)


@given(TOKENS, TOKENS, TOKENS)
def test_common_tokens_are_counted_from_the_beginning(common: list[int], one: list[int], other: list[int]) -> None:
    first, second = array("i", common + one), array("i", common + other)
    expected = 0
    while expected < min(len(first), len(second)) and first[expected] == second[expected]:
        expected += 1
    assert count_common_tokens(first.tobytes(), second.tobytes()) == expected


def test_hash_of_a_partial_page_is_never_that_of_a_full_page() -> None:
    tokens = array("i", range(8))
    keys: list[bytes] = []
    extend_page_hashes(keys, tokens, 8, 4, b"tenant")
    assert partial_page_hash(keys[0], tokens[4:].tobytes()) not in keys
    assert partial_page_hash(b"tenant", tokens[:2].tobytes()) != partial_page_hash(b"other", tokens[:2].tobytes())


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences as the scheduler runs them. A text is its tenant and its tokens from the beginning."""

    @initialize(num_pages=st.integers(3, 10), page_size=st.integers(1, 4))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pool, self.size, self.num_pages = PagePool(num_pages), page_size, num_pages
        self.prefixes = PrefixCache(self.pool, KvGroups(page_size))
        self.running: dict[Sequence, None] = {}
        self.parked: list[tuple[Sequence, object]] = []
        self.held: list[list[tuple[bytes, tuple[int, ...]] | None]] = [[None] * page_size for _ in range(num_pages)]
        """The text whose KV was computed into each place of each page."""
        self.indexed: dict[tuple[bytes, tuple[int, ...]], int] = {}
        """Indexed pages, full and partial, by the text up to their end."""

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from((b"", b"", b"other")),
        is_patient=st.booleans(),
    )
    def arrive(self, tokens: list[int], salt: bytes, is_patient: bool) -> None:
        subscriber = Subscriber(1, 0, 100, frozenset(), len(tokens), 0.0)
        sequence = Sequence(subscriber, array("i", tokens).tobytes(), len(tokens), SamplingParams(), salt=salt)
        self.try_to_run(sequence, is_patient=is_patient)

    def try_to_run(self, sequence: Sequence, *, is_patient: bool) -> None:
        prefix = self.prefixes.find(sequence)
        self.check_prefix(sequence, prefix)
        if prefix.awaited is not None and is_patient:
            self.parked.append((sequence, prefix.awaited))
            return
        num_new = -(-(len(sequence.tokens) + 1) // self.size) - len(prefix.pages)
        for page in prefix.pages:
            self.pool.hold(page)
        sources = [prefix.copy_source] if prefix.num_copied_tokens and self.pool.is_idle(prefix.copy_source) else []
        for page in sources:
            self.pool.hold(page)
        if num_new > self.pool.num_available:
            self.pool.release(prefix.pages + sources)
            return
        pages = self.allocate(num_new)
        sequence.kv.pages = prefix.pages + pages
        if prefix.num_copied_tokens:
            self.held[pages[0]] = list(self.held[prefix.copy_source])
        self.pool.release(sources)
        sequence.kv.num_prefilled = len(prefix.pages) * self.size
        sequence.num_computed = sequence.kv.num_prefilled + prefix.num_copied_tokens
        sequence.kv.num_indexed_pages = len(prefix.pages)
        self.prefixes.start(sequence)
        self.running[sequence] = None

    def allocate(self, count: int) -> list[int]:
        pages = self.pool.allocate(count)
        self.indexed = {text: page for text, page in self.indexed.items() if page not in pages}
        return pages

    def check_prefix(self, sequence: Sequence, prefix: Prefix) -> None:
        """The prefix contains exactly the pages and tokens that are available."""
        tokens, salt, size = tuple(sequence.tokens), sequence.salt, self.size
        expected: list[int] = []
        while (end := (len(expected) + 1) * size) < len(tokens) and (salt, tokens[:end]) in self.indexed:
            expected.append(self.indexed[salt, tokens[:end]])
        assert prefix.pages == expected
        for index, page in enumerate(prefix.pages):
            first = index * size
            assert self.held[page] == [(salt, tokens[: place + 1]) for place in range(first, first + size)]
        first = len(expected) * size
        for place in range(prefix.num_copied_tokens):
            assert self.held[prefix.copy_source][place] == (salt, tokens[: first + place + 1])
        if prefix.awaited is None or isinstance(prefix.awaited, Sequence):
            assert prefix.num_copied_tokens == self.most_to_copy(salt, tokens, first)
        assert first + prefix.num_copied_tokens < len(tokens)

    def most_to_copy(self, salt: bytes, tokens: tuple[int, ...], first: int) -> int:
        needed = tokens[: min(first + self.size, len(tokens) - 1)]
        known = [text for owner, text in self.indexed if owner == salt and first < len(text) <= first + self.size]
        known += [
            tuple(other.tokens[: other.num_applied])
            for other in self.running
            if other.salt == salt and other.kv.num_indexed_pages * self.size == first and not other.kv.is_suspect
        ]
        return max(0, *(common(needed, text) - first for text in known)) if known else 0

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 9), following=st.integers(0, 1), is_plain=st.booleans())
    def compute(self, data: st.DataObject, count: int, following: int, is_plain: bool) -> None:
        sequence = data.draw(st.sampled_from(list(self.running)))
        is_decode = len(sequence.tokens) > sequence.num_given_tokens
        end = min(max(sequence.num_computed, sequence.num_applied) + count, len(sequence.tokens))
        if end == len(sequence.tokens) and end // self.size == len(sequence.kv.pages):
            if not self.pool.num_available:
                return
            sequence.kv.pages += self.allocate(1)
        tokens = tuple(sequence.tokens)
        for place in range(sequence.num_applied, end):
            page = sequence.kv.pages[place // self.size]
            text = sequence.salt, tokens[: place + 1]
            # Copied tokens are computed already.
            assert place >= sequence.num_computed or self.held[page][place % self.size] == text
            self.held[page][place % self.size] = text
        sequence.num_computed = end
        if not (is_plain and is_decode and end % self.size):
            for index in range(sequence.kv.num_indexed_pages, end // self.size):
                self.add_to_index(sequence, index, (index + 1) * self.size)
            self.unpark(self.prefixes.note_computed(sequence, end))
        if end == len(sequence.tokens):
            sequence.tokens.append(following)

    def add_to_index(self, sequence: Sequence, index: int, end: int) -> None:
        if sequence.kv.is_suspect:
            return
        text, page = (sequence.salt, tuple(sequence.tokens[:end])), sequence.kv.pages[index]
        if text not in self.indexed and page not in self.indexed.values():
            self.indexed[text] = page

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_bad=st.booleans(), is_patient=st.booleans())
    def stop(self, data: st.DataObject, is_bad: bool, is_patient: bool) -> None:
        sequence = data.draw(st.sampled_from(list(self.running)))
        if is_bad:
            self.prefixes.invalidate_tenant(sequence.salt)
            assert all(other.kv.is_suspect for other in self.running if other.salt == sequence.salt)
            self.indexed = {text: page for text, page in self.indexed.items() if text[0] != sequence.salt}
        elif sequence.num_applied > sequence.kv.num_indexed_pages * self.size:
            self.add_to_index(sequence, sequence.kv.num_indexed_pages, sequence.num_applied)
        del self.running[sequence]
        freed = self.prefixes.stop(sequence)
        self.pool.release(sequence.kv.pages)
        self.unpark(freed, is_patient=is_patient)

    def unpark(self, freed: list[object], *, is_patient: bool = True) -> None:
        going = [sequence for sequence, awaited in self.parked if awaited in freed]
        self.parked = [(sequence, awaited) for sequence, awaited in self.parked if awaited not in freed]
        for sequence in going:
            self.try_to_run(sequence, is_patient=is_patient)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        self.prefixes.check_integrity(self.running, {awaited for _, awaited in self.parked})
        assert self.pool.num_held == len({page for sequence in self.running for page in sequence.kv.pages})


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(max_examples=60, stateful_step_count=40)
