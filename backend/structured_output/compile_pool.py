"""Compiles grammars in killable child processes, in turns between tenants.

Each thread of the pool has one child. The child compiles a grammar within the limits, or is killed. Then the thread
compiles it again in this process, because a compiled grammar cannot be sent. The second compilation is bounded: it
takes about as much time and memory as the child reported.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from llguidance import LLTokenizer

from penstock.backend.structured_output.compile_grammar import CompiledGrammar, compile_grammar, load_tokenizer
from penstock.backend.structured_output.compiler_process import (
    CompileLimits,
    CompilerDied,
    CompilerProcess,
    TokenizerUnusable,
)
from penstock.shm.messages import Grammar

logger = logging.getLogger("penstock.backend")

_NUM_CHILDREN = 2
_MAX_PER_TENANT = _NUM_CHILDREN - 1
"""Children that one tenant may keep busy. So a tenant whose grammars run into the limits delays only its own."""
_MAX_ATTEMPTS = 2
"""A grammar whose child was killed from outside is tried once more."""
_STACK_BYTES = 16 << 20
"""Twice the child's stack, so that every grammar that fits there fits here."""
_CLOSE_TIMEOUT_S = 1.0


class CompilerFailed(Exception):
    """The children keep dying for reasons that are not the grammar's fault."""


class ICompilePool(Protocol):
    """The interface that `GrammarCache` uses."""

    def submit(self, grammar: Grammar, tenant: bytes) -> Future[CompiledGrammar]:
        """The future raises BadGrammar, TokenizerUnusable, CompilerFailed. Only `cancel` may cancel it."""

    def add_tenant(self, future: Future[CompiledGrammar], grammar: Grammar, tenant: bytes) -> None:
        """Note that another tenant waits for the same grammar, so it may also be compiled at that tenant's turn."""

    def cancel(self, future: Future[CompiledGrammar]) -> bool:
        """Note that nobody waits for it any more. False if it is already being compiled, or done."""

    def close(self) -> None: ...


class CompilePool:
    """The threads and their children start with the first grammar, and stay."""

    def __init__(
        self,
        tokenizer_json: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        limits: CompileLimits = CompileLimits(),  # noqa: B008 - frozen
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._limits = limits
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._turns = CompileTurns()
        self._work = threading.Condition()
        """Guards _turns, _children, _is_closed, and the change of a future from waiting to running or cancelled."""
        self._children: dict[int, CompilerProcess] = {}
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """The children that have started."""
        with self._work:
            return [child.pid for child in self._children.values()]

    def submit(self, grammar: Grammar, tenant: bytes) -> Future[CompiledGrammar]:
        future: Future[CompiledGrammar] = Future()
        with self._work:
            self._turns.put(tenant, future, grammar)
            if not self._threads:
                self._start()
            self._work.notify()
        return future

    def add_tenant(self, future: Future[CompiledGrammar], grammar: Grammar, tenant: bytes) -> None:
        with self._work:
            self._turns.put(tenant, future, grammar)
            self._work.notify()

    def cancel(self, future: Future[CompiledGrammar]) -> bool:
        with self._work:
            if not future.cancel():
                return False
            self._turns.discard(future)
            return True

    def close(self) -> None:
        """Kill the children. Unfinished futures stay unfinished."""
        with self._work:
            self._is_closed = True
            for child in self._children.values():
                child.kill()
            self._work.notify_all()
        for thread in self._threads:  # one that compiles in this process is not waited for: it ends with the process
            thread.join(_CLOSE_TIMEOUT_S)

    def _start(self) -> None:
        previous = threading.stack_size(_STACK_BYTES)
        try:
            for place in range(_NUM_CHILDREN):
                thread = threading.Thread(target=self._run, args=(place,), name=f"grammars-{place}", daemon=True)
                thread.start()
                self._threads.append(thread)
        finally:
            threading.stack_size(previous)

    def _run(self, place: int) -> None:
        while self._run_next(place):
            pass
        with self._work:
            child = self._children.pop(place, None)
        if child is not None:
            child.close()

    def _run_next(self, place: int) -> bool:
        """Wait for a grammar and compile it; return False when the pool is closed.

        The thread keeps no reference to it: its memory is the caller's.
        """
        with self._work:
            while not self._is_closed and (turn := self._turns.take()) is None:
                self._work.wait()
            if self._is_closed or turn is None:
                return False
        tenant, future, grammar = turn
        try:
            compiled = self._compile(place, grammar)
        except BaseException as error:  # noqa: BLE001 - whatever it is, those who wait for the future get it, logged
            if not self._is_closed:
                future.set_exception(error)
        else:
            future.set_result(compiled)
        with self._work:
            self._turns.end(tenant)
            self._work.notify()
        return True

    def _compile(self, place: int, grammar: Grammar) -> CompiledGrammar:
        """Raises BadGrammar, TokenizerUnusable, CompilerFailed."""
        for _ in range(_MAX_ATTEMPTS):
            try:
                report = self._child(place).compile(grammar)
            except CompilerDied as error:
                if self._is_closed:
                    break
                logger.warning("a grammar compiler %s; its grammar is tried again", error)
                continue
            tokenizer = self._load_tokenizer()
            matcher = compile_grammar(tokenizer, Grammar("lark", report.relaxed) if report.relaxed else grammar)
            compiled = CompiledGrammar(matcher, tokenizer.eos_token, report.num_bytes, tokenizer=tokenizer)
            compiled.matcher.compute_bitmask()  # fills the lexer's cache, which all copies share
            began_ns = time.thread_time_ns()
            compiled.matcher.compute_bitmask()
            compiled.pace.note(time.thread_time_ns() - began_ns)
            compiled.growth.start(compiled.matcher)
            return compiled
        raise CompilerFailed(f"{_MAX_ATTEMPTS} compilers have died over one grammar")

    def _child(self, place: int) -> CompilerProcess:
        """The thread's child, or a new one. Raises TokenizerUnusable, CompilerDied."""
        with self._work:
            child = self._children.get(place)
            if child is not None and child.is_alive:
                return child
            self._children.pop(place, None)
        if child is not None:
            child.close()
        child = CompilerProcess(self._tokenizer_json, self._vocab_size, self._eos_token_ids, self._limits)
        with self._work:
            self._children[place] = child
            if self._is_closed:  # `close` has not seen it
                child.kill()
        return child

    def _load_tokenizer(self) -> LLTokenizer:
        """Raises TokenizerUnusable."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = load_tokenizer(self._tokenizer_json, self._vocab_size, self._eos_token_ids)
                except (OSError, ValueError) as error:
                    raise TokenizerUnusable(str(error)) from error
            return self._tokenizer


class CompileTurns:
    """Grammars that wait to be compiled: tenants take turns, each tenant's own are first come, first served.

    Not safe for threads. A grammar that several tenants wait for is here once for each, with one future.
    """

    def __init__(self, max_per_tenant: int = _MAX_PER_TENANT) -> None:
        self._max_per_tenant = max_per_tenant
        self._waiting: OrderedDict[bytes, dict[Future[CompiledGrammar], Grammar]] = OrderedDict()
        """Tenants with waiting grammars; the next in turn is first."""
        self._tenants: dict[Future[CompiledGrammar], list[bytes]] = {}
        """The tenants that wait for each."""
        self._num_running: Counter[bytes] = Counter()

    def put(self, tenant: bytes, future: Future[CompiledGrammar], grammar: Grammar) -> None:
        """Does nothing if the tenant waits for it already, or if it has begun."""
        if future.running() or future.done() or future in self._waiting.get(tenant, {}):
            return
        self._waiting.setdefault(tenant, {})[future] = grammar
        self._tenants.setdefault(future, []).append(tenant)

    def take(self) -> tuple[bytes, Future[CompiledGrammar], Grammar] | None:
        """The next grammar, whose future is now running; call `end` afterwards. None if nothing may run now."""
        for tenant, queue in self._waiting.items():
            if self._num_running[tenant] < self._max_per_tenant:
                future, grammar = next(iter(queue.items()))
                self.discard(future)
                if tenant in self._waiting:
                    self._waiting.move_to_end(tenant)
                future.set_running_or_notify_cancel()
                self._num_running[tenant] += 1
                return tenant, future, grammar
        return None

    def discard(self, future: Future[CompiledGrammar]) -> None:
        """Remove a grammar that need not be compiled."""
        for tenant in self._tenants.pop(future, ()):
            del self._waiting[tenant][future]
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    def end(self, tenant: bytes) -> None:
        """Note that the tenant's grammar has been compiled."""
        self._num_running[tenant] -= 1
        if not self._num_running[tenant]:
            del self._num_running[tenant]
