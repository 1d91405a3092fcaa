"""Limits what one sequence may sample next: a grammar, the client's token lists, and a forced end of reasoning.

Constraints know generated tokens only. `advance` takes each token as it is sampled and `fill_mask` gives the mask for
the next one. `rewind` undoes tokens that were dropped after they were sampled, for example at a preemption.
"""

from __future__ import annotations

import re
import time
import weakref
from collections import deque
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from penstock.backend.structured_output.grammar_costs import (
    GrammarMemoryFull,
    Growth,
    Pace,
    StreamGrowth,
    error_of,
    one_line,
)
from penstock.process.native_libraries import reason_of_panic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

    from penstock.backend.structured_output.compile_grammar import CompiledGrammar
    from penstock.shm.messages import Constraints

    TokenBits: TypeAlias = NDArray[np.uint32]
    """[ceil(vocab_size / 32)] one bit per token: bit i % 32 of word i // 32 is token i. The form in which a forward
    pass receives masks: `TokenMasks.bits`."""


def bits_of(token_ids: Iterable[int], vocab_size: int) -> TokenBits:
    """Raises IndexError for a token id outside the vocabulary, rounded up to a multiple of 32."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@lru_cache(maxsize=1)
def bits_of_all(vocab_size: int) -> TokenBits:
    """Every token of the vocabulary. Callers share the array and must not change it."""
    return bits_of(range(vocab_size), vocab_size)


def set_bit(bits: TokenBits, token_id: int) -> None:
    bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def clear_bit(bits: TokenBits, token_id: int) -> None:
    bits[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))


_MAX_FORCED_BYTES = 64
_MAX_GUESS_NS = 2_000_000
"""A sequence whose guess takes more CPU time, or panics, gets no more: the step's other rows wait for it."""
_NUM_LOOKED_AT = 64
"""Last tokens of an answer that show its spaces."""
_AFTER_COMMA, _AFTER_COLON = re.compile(rb'[{,](\s*)"'), re.compile(rb'":(\s*)')


def forced_tokens(matcher: LLMatcher, tokenizer: LLTokenizer, past_tokens: list[int]) -> list[int]:
    """Guess the tokens after the past ones: the text that the grammar forces, with spaces as in the past text."""
    past = tokenizer.decode_bytes(past_tokens[-_NUM_LOOKED_AT:])
    comma, colon = ((shape.findall(past) or [b" "])[-1] for shape in (_AFTER_COMMA, _AFTER_COLON))
    after_comma, after_colon = (comma + b'"', comma), (colon + b'"', colon)
    closed = [b":" + part for part in after_colon] + [b"," + part for part in after_comma]
    separators = {b'"': closed, b",": after_comma, b":": after_colon}
    walker, text, last = matcher.deep_copy(), b"", past[-1:]
    free_text = tokenizer.tokenize_bytes(b"~")

    def takes(part: bytes) -> bool:
        tokens = tokenizer.tokenize_bytes(part)
        return walker.validate_tokens(tokens) == len(tokens) and walker.consume_tokens(tokens)

    while len(text) < _MAX_FORCED_BYTES:
        part = walker.compute_ff_bytes()
        if part:
            if not takes(part):
                break
        elif walker.validate_tokens(free_text) or not (part := next(filter(takes, separators.get(last, ())), b"")):
            break
        text, last = text + part, part[-1:]
    return tokenizer.tokenize_bytes(text.rstrip())  # a last space may be a part of what follows


class ConstraintFailed(Exception):
    """No token satisfies the constraints, or a grammar exceeded a limit. This ends its own request only."""


class SequenceConstraints:
    """The constraints of one sequence.

    Once made, used only by the threads that run the steps, and by the thread of `LateMasks` while `late` is not done.
    """

    def __init__(
        self,
        requested: Constraints,
        grammar: CompiledGrammar | None,
        stop_ids: frozenset[int],
        vocab_size: int,
        backlog: Sequence[int] = (),
        tenant: bytes = b"",
    ) -> None:
        """grammar is this sequence's own copy, at its beginning. stop_ids are masked until min_tokens, and until the
        grammar may end.

        The backlog are tokens that another backend generated before; they are consumed before the first mask. Late
        masks take the tenant's turns, and the tenant pays for the grammar's growth.
        """
        self.tenant = tenant
        self._requested = requested
        self._backlog = backlog
        self.late: LateMask | None = None
        """The mask that `LateMasks` fills for this sequence, or has filled. It owns these constraints until then."""
        self._matcher = grammar.matcher if grammar is not None else None
        self._tokenizer = grammar.tokenizer if grammar is not None else None
        self._matcher_end = grammar.end_token_id if grammar is not None else -1
        self._pace = grammar.pace if grammar is not None else Pace()
        self._growth = StreamGrowth(grammar.growth if grammar is not None else Growth(), tenant)
        self._failure = ""
        """Raised where the next mask is due. The token at which the grammar met a limit is still delivered."""
        allowed = requested.allowed_token_ids
        self._allowed = bits_of(allowed, vocab_size) if allowed else bits_of_all(vocab_size)
        # A client may name stop ids beyond the vocabulary: they are never sampled.
        self._grammar_ends = tuple(end for end in requested.grammar_ends if end < vocab_size)
        self._all_but_stops = ~bits_of((stop_id for stop_id in stop_ids if stop_id < vocab_size), vocab_size)
        self.wants_guess = False
        """Set by the main thread: `guess` is due after the next tokens."""
        self.guess: tuple[int, list[int]] = 0, []
        """Number of generated tokens, and a guess of those that follow. Any thread may read it."""
        self._tokens: list[int] = []
        self._grammar_start = 0 if not requested.grammar_after else None
        """Number of generated tokens at which the grammar began; None until it begins."""
        self._thinking_stop: int | None = None
        """Number of generated tokens at which thinking_end was complete; None until it is."""

    @property
    def num_tokens(self) -> int:
        """Generated tokens, including the backlog."""
        return len(self._tokens) + len(self._backlog)

    @property
    def is_late(self) -> bool:
        """The next mask may take long: `LateMasks` should fill it."""
        if self._backlog:
            return True
        return self._pace.is_slow and self._grammar_start is not None

    @property
    def awaits_mask(self) -> bool:
        """`LateMasks` is filling the next mask. Safe from any thread."""
        late = self.late
        return late is not None and not late.is_done

    def take_backlog(self) -> Sequence[int]:
        """Return and clear the backlog; the caller gives these tokens to `advance` first."""
        backlog, self._backlog = self._backlog, ()
        return backlog

    def advance(self, token_id: int, consume: Callable[[LLMatcher, int], bool] | None = None) -> None:
        """Consume the next generated token. consume makes a matcher consume a token; default: `consume_token`."""
        self._tokens.append(token_id)
        if self._thinking_stop is None and self._ends_with(self._requested.thinking_end):
            self._thinking_stop = len(self._tokens)
        if self._grammar_start is None:
            if self._ends_with(self._requested.grammar_after):
                self._grammar_start = len(self._tokens)
        elif self._matcher is not None and not self._failure:
            # Another consume may work in another thread, whose CPU time cannot be asked for.
            clock = time.thread_time_ns if consume is None else time.perf_counter_ns
            began_ns = clock()
            known = self._matcher_end if token_id in self._grammar_ends else token_id
            try:
                took = self._matcher.consume_token(known) if consume is None else consume(self._matcher, known)
                reason = None if took else error_of(self._matcher)
            except BaseException as error:
                if (reason := reason_of_panic(error)) is None:
                    raise
            self._pace.note(clock() - began_ns)
            if reason is not None:
                self._failure = self._note_failure(reason)

    def make_guess(self) -> None:
        """Renew `guess`, if it is wanted."""
        if not self.wants_guess or self._matcher is None or self._tokenizer is None or self._failure:
            return
        self.wants_guess = False
        if self._grammar_start is None or not self._tokens or self._pace.is_slow:
            return
        began_ns = time.thread_time_ns()
        try:
            self.guess = len(self._tokens), forced_tokens(self._matcher, self._tokenizer, self._tokens)
            may_guess_on = time.thread_time_ns() - began_ns <= _MAX_GUESS_NS
        except BaseException as error:
            if reason_of_panic(error) is None:
                raise
            may_guess_on = False
        if not may_guess_on:
            self._tokenizer = None

    def fork(self) -> SequenceConstraints | None:
        """A copy to advance by drafts, for as long as a step; None if the grammar's library cannot copy it.

        Its memory is not counted, nor its failures.
        """
        fork = copy(self)
        fork._tokens = self._tokens.copy()
        if self._matcher is not None:
            try:
                fork._matcher = self._matcher.deep_copy()
            except BaseException as error:
                if reason_of_panic(error) is None:
                    raise
                return None
        fork._growth = StreamGrowth(Growth(), self.tenant)
        return fork

    def rewind(self, num_tokens: int) -> None:
        """Drop all but the first num_tokens consumed tokens. Does nothing when no more than that were consumed."""
        num_kept = min(num_tokens, len(self._tokens))
        if self._grammar_start is not None:
            if self._matcher is not None and len(self._tokens) > self._grammar_start:
                try:
                    self._matcher.rollback(len(self._tokens) - max(num_kept, self._grammar_start))
                except BaseException as error:
                    if (reason := reason_of_panic(error)) is None:
                        raise
                    self._failure = self._note_failure(reason)
            if num_kept < self._grammar_start:
                self._grammar_start = None
        if self._thinking_stop is not None and num_kept < self._thinking_stop:
            self._thinking_stop = None
        del self._tokens[num_kept:]

    def fill_mask(self, mask: TokenBits) -> None:
        """Write the next token's mask. At least one bit is set. Raises ConstraintFailed.

        Stop tokens are allowed, and min_tokens and bad_words ignored, where no other token is left.
        """
        if self._failure:
            raise ConstraintFailed(self._failure)
        try:
            self._fill_mask(mask)
        except BaseException as error:
            if (reason := reason_of_panic(error)) is None:
                raise
            raise ConstraintFailed(self._note_failure(reason)) from None

    def _fill_mask(self, mask: TokenBits) -> None:
        if (forced := self._forced_token()) is not None:
            mask[:] = 0
            set_bit(mask, forced)
            return
        mask[:] = self._allowed
        if self._matcher is not None and self._grammar_start is not None:
            mask &= self._grammar_mask(self._matcher, mask)
            if not mask.any():
                raise ConstraintFailed("the grammar and the token lists together allow no token")
        if not self._may_stop() and (mask & self._all_but_stops).any():
            mask &= self._all_but_stops
        self._drop_bad_words(mask)

    def _may_stop(self) -> bool:
        """Whether a stop token may be sampled. During reasoning it would end the answer before its grammar begins."""
        if len(self._tokens) < self._requested.min_tokens or self._grammar_start is None:
            return False
        return self._matcher is None or self._matcher.is_accepting()

    def _grammar_mask(self, matcher: LLMatcher, like: TokenBits) -> TokenBits:
        """The tokens that the grammar allows next."""
        mask = np.zeros_like(like)
        began_ns = time.thread_time_ns()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        spent_ns = time.thread_time_ns() - began_ns
        self._pace.note(spent_ns)
        if matcher.is_error():
            raise ConstraintFailed(self._note_failure(error_of(matcher)))
        try:
            self._growth.note(spent_ns, matcher)
        except GrammarMemoryFull as error:
            raise ConstraintFailed(self._note_failure(str(error))) from None
        if self._grammar_ends and matcher.is_accepting():
            for end in self._grammar_ends:
                set_bit(mask, end)
        return mask

    def _note_failure(self, reason: str) -> str:
        self._growth.note_failure()
        return one_line(f"the grammar cannot continue: {reason}")

    def _forced_token(self) -> int | None:
        """The next token of thinking_end once the reasoning budget is used up."""
        requested = self._requested
        index = len(self._tokens) - requested.thinking_budget_tokens
        is_due = requested.thinking_budget_tokens > 0 and index >= 0 and self._thinking_stop is None
        return requested.thinking_end[index] if is_due and index < len(requested.thinking_end) else None

    def _drop_bad_words(self, mask: TokenBits) -> None:
        left = mask.copy()
        for run in self._requested.bad_words:
            if len(run) == 1 or self._ends_with(run[:-1]):
                clear_bit(left, run[-1])
        if left.any():
            mask[:] = left

    def _ends_with(self, run: tuple[int, ...]) -> bool:
        return bool(run) and tuple(self._tokens[-len(run) :]) == run


class LateMask:
    """A mask that `LateMasks` fills: the one after the first num_tokens generated tokens.

    Until it is done, the constraints belong to the thread of `LateMasks`.
    """

    __slots__ = ("constraints", "failure", "is_done", "mask", "num_tokens", "tenant", "tokens")

    def __init__(self, constraints: SequenceConstraints, tokens: Iterable[int], num_tokens: int) -> None:
        self.constraints = weakref.ref(constraints)
        """Dead when the sequence has ended; then nothing is left to do."""
        self.tenant = constraints.tenant
        self.tokens = deque(tokens)
        """Tokens that the constraints take in first."""
        self.num_tokens = num_tokens
        self.mask: TokenBits | None = None
        self.failure = ""
        """Not the exception: its traceback would keep the constraints alive, and with them their matcher."""
        self.is_done = False
