"""Grammars that are compiled, being compiled, or refused. `compile_pool` compiles; `constraints` applies a compiled
grammar."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace

from penstock.backend.structured_output.compile_grammar import CompiledGrammar
from penstock.backend.structured_output.compile_pool import CompilerFailed, ICompilePool
from penstock.backend.structured_output.compiler_process import TokenizerUnusable
from penstock.backend.structured_output.grammar_costs import BadGrammar, GrammarMemory, GrammarMemoryFull, Growth
from penstock.process.admission import is_over_share
from penstock.process.native_libraries import LibraryError, guarded
from penstock.shm.messages import Grammar

logger = logging.getLogger("penstock.backend")

_CACHE_BYTES = 128 << 20
_MAX_GROWTH_BYTES = 8 << 20
"""A grammar that has grown by more leaves the cache, and is compiled again for the next request.

Large schemas grow by less than 1 MB, and a lexer that is nearly full fails its new streams.
"""
_BYTES_PER_GRAMMAR, _BYTES_PER_CHARACTER = 32 << 10, 512
"""Least memory that a compiled grammar counts: a base, and an amount per character of its text.

Used when the compiling child measured less, or could not measure.
"""
_BYTES_PER_REFUSAL = 1 << 10
MAX_PENDING = 256


class TooManyGrammars(Exception):
    """MAX_PENDING other grammars are being compiled, and the tenant has its share of them."""


@dataclass(slots=True)
class _Pending:
    """A grammar in the pool."""

    future: Future[CompiledGrammar]
    tenants: set[bytes] = field(default_factory=set)
    """The tenants that asked for it."""


class GrammarCache:
    """The pool and a cache of its results. Owned by the main thread, the only one that calls it."""

    def __init__(self, pool: ICompilePool, memory: GrammarMemory | None = None) -> None:
        """memory bounds compiled grammars that are cached or in use; default: a new one with the default limit."""
        self._pool = pool
        self._memory = memory or GrammarMemory()
        self._pending: dict[Grammar, _Pending] = {}
        self._num_pending: Counter[bytes] = Counter()
        """Pending grammars of each tenant."""
        self._settled: OrderedDict[Grammar, CompiledGrammar | BadGrammar] = OrderedDict()
        """Compiled grammars and errors, least recently used first. Finding an error may have taken long, too."""
        self._num_bytes = 0
        """Memory of everything in _settled, without growth."""
        self._growths: dict[Grammar, Growth] = {}
        """The growth of each compiled grammar in _settled. Other threads add to it."""

    def find_compiled(self, grammar: Grammar) -> CompiledGrammar | None:
        """A copy at its beginning, for the caller; None if the grammar must be compiled. Raises BadGrammar."""
        self._trim()
        if grammar not in self._settled:
            return None
        self._settled.move_to_end(grammar)
        return _copy_of(self._settled[grammar])

    def compile(self, grammar: Grammar, tenant: bytes = b"", *, is_limited: bool = True) -> Future[CompiledGrammar]:
        """Start compiling, or return the future of an equal grammar. `take_result` reads its result.

        is_limited raises TooManyGrammars beyond the limit. The future raises BadGrammar, CompilerFailed and others.
        """
        pending = self._pending.get(grammar)
        if pending is None:
            if is_limited and is_over_share(self._num_pending, tenant, MAX_PENDING):
                raise TooManyGrammars
            pending = self._pending[grammar] = _Pending(self._pool.submit(grammar, tenant))
        elif tenant not in pending.tenants:
            self._pool.add_tenant(pending.future, grammar, tenant)
        if tenant not in pending.tenants:
            pending.tenants.add(tenant)
            self._num_pending[tenant] += 1
        return pending.future

    def take_result(self, grammar: Grammar, future: Future[CompiledGrammar], tenant: bytes = b"") -> CompiledGrammar:
        """A copy at its beginning, for the caller, from a future of `compile` that is done. The result is cached.

        Raises BadGrammar; CompilerFailed and GrammarMemoryFull, which are not cached.
        """
        self._forget_pending(grammar, future)
        error = future.exception(timeout=0)
        if isinstance(error, CompilerFailed):
            logger.error("a grammar could not be compiled: %s", error)
            raise CompilerFailed(str(error))
        if isinstance(error, BadGrammar):
            outcome: CompiledGrammar | BadGrammar = BadGrammar(str(error))  # the traceback would keep objects alive
        elif isinstance(error, TokenizerUnusable):
            logger.error("no grammar can be compiled for this model: %s", error)
            outcome = BadGrammar("no grammar can be compiled for this model's tokenizer")
        elif error is not None:  # a bug in the library: fails these requests only
            logger.error("a grammar could not be compiled", exc_info=error)
            outcome = BadGrammar("this grammar cannot be compiled for this model's tokenizer")
        else:
            outcome = future.result(timeout=0)
            outcome.growth.charge(_num_bytes(grammar, outcome), self._memory, tenant)
        if grammar not in self._settled:
            self._cache(grammar, outcome)
        return _copy_of(outcome)

    def cancel(self, grammar: Grammar) -> None:
        """Note that no request waits for the grammar. It is not compiled unless compilation has begun."""
        pending = self._pending.get(grammar)
        if pending is not None and self._pool.cancel(pending.future):
            self._forget_pending(grammar, pending.future)

    def settle_abandoned(self, grammar: Grammar, future: Future[CompiledGrammar], tenant: bytes) -> None:
        """Count the result of a future, which is done, in the cache after its waiting request was cancelled."""
        pending = self._pending.get(grammar)
        if pending is not None and pending.future is future:
            # Other requests that wait for it take it themselves.
            with suppress(BadGrammar, CompilerFailed, GrammarMemoryFull):
                self.take_result(grammar, future, tenant)

    def _forget_pending(self, grammar: Grammar, future: Future[CompiledGrammar]) -> None:
        """Does nothing when the grammar is being compiled anew."""
        pending = self._pending.get(grammar)
        if pending is not None and pending.future is future:
            del self._pending[grammar]
            self._num_pending.subtract(pending.tenants)
            self._num_pending += Counter()  # drops the zeros

    def close(self) -> None:
        self._pool.close()

    def _cache(self, grammar: Grammar, outcome: CompiledGrammar | BadGrammar) -> None:
        self._settled[grammar] = outcome
        self._num_bytes += _num_bytes(grammar, outcome)
        if not isinstance(outcome, BadGrammar):
            self._growths[grammar] = outcome.growth
        self._trim()

    def _trim(self) -> None:
        """Drop grammars that grew too much, then the least recently used until all, with their growth, fit
        the cache."""
        num_grown_bytes = 0
        for grammar, growth in list(self._growths.items()):
            if growth.is_spent or growth.num_bytes > _MAX_GROWTH_BYTES:
                self._drop(grammar)
            else:
                num_grown_bytes += growth.num_bytes
        while self._settled and self._num_bytes + num_grown_bytes > _CACHE_BYTES:
            num_grown_bytes -= self._drop(next(iter(self._settled)))

    def _drop(self, grammar: Grammar) -> int:
        """Drop it and return its growth. Streams that use it keep it alive until they end."""
        self._num_bytes -= _num_bytes(grammar, self._settled.pop(grammar))
        growth = self._growths.pop(grammar, None)
        return growth.num_bytes if growth is not None else 0


def _copy_of(outcome: CompiledGrammar | BadGrammar) -> CompiledGrammar:
    if isinstance(outcome, BadGrammar):
        raise BadGrammar(str(outcome))
    try:
        return replace(outcome, matcher=guarded(outcome.matcher.deep_copy)())
    except LibraryError as error:
        raise BadGrammar(str(error)) from None


def _num_bytes(grammar: Grammar, outcome: CompiledGrammar | BadGrammar) -> int:
    if isinstance(outcome, BadGrammar):
        return _BYTES_PER_REFUSAL + len(grammar.text)
    return max(outcome.num_bytes, _BYTES_PER_GRAMMAR + _BYTES_PER_CHARACTER * len(grammar.text))
