"""Compiles grammars in a thread, within limits of size and time. `constraints` applies the compiled grammar.

llguidance does the work (https://github.com/guidance-ai/llguidance); it releases the GIL while it compiles.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.shm.messages import Grammar

logger = logging.getLogger("penstock.backend")

_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=200_000,  # at most about 15 ms in one mask
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=100_000,
    verbose_errors=False,  # verbose ones would put a client's schema into the log
)
_WHITESPACE = r" ?|\n {0,24}"
"""Allowed between the parts of a JSON text: what models write, on one line or indented. Bounded, so it always ends."""
_SLICES = ["[a-z]+", *LLTokenizer.general_slices()]
"""Groups of tokens that are masked at once when all of them are allowed; a token belongs to the first that matches it.
Other tokens are checked one by one: about 1 ms for 100,000. "[a-z]+" is for names and for text that is not JSON."""
_CACHE_BYTES = 64 << 20
_BYTES_PER_GRAMMAR, _BYTES_PER_CHARACTER = 32 << 10, 512
"""Memory of a compiled grammar: a base and an amount per character of its text. An estimate, measured on expressions of
a few characters and schemas of a few hundred; so the bound of the cache is an estimate too."""
_BYTES_PER_REFUSAL = 1 << 10
MAX_PENDING = 256
_MAX_ERROR_CHARACTERS = 300


class BadGrammar(Exception):
    """The grammar does not compile within the limits. The text tells its author why, in one line."""


class TooManyGrammars(Exception):
    """MAX_PENDING other grammars are being compiled."""


class GrammarCompiler:
    """A compiling thread and a cache of its results. Owned by the main thread, the only one that calls it."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """The compiling thread reads the tokenizer when the first grammar arrives."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._pending: dict[Grammar, Future[LLMatcher]] = {}
        self._settled: OrderedDict[Grammar, LLMatcher | BadGrammar] = OrderedDict()
        """Compiled grammars and errors, least recently used first. Finding an error may have taken long, too."""
        self._num_bytes = 0

    def find_compiled(self, grammar: Grammar) -> LLMatcher | None:
        """A new matcher at its beginning, for the caller; None if the grammar must be compiled. Raises BadGrammar."""
        if grammar not in self._settled:
            return None
        self._settled.move_to_end(grammar)
        return _matcher_of(self._settled[grammar])

    def compile(self, grammar: Grammar) -> Future[LLMatcher]:
        """Start compiling in the thread, or return the future of an equal grammar. `take_result` reads its result.

        Raises TooManyGrammars. The future raises BadGrammar.
        """
        future = self._pending.get(grammar)
        if future is None:
            if len(self._pending) >= MAX_PENDING:
                self._take_abandoned_results()
            if len(self._pending) >= MAX_PENDING:
                raise TooManyGrammars
            future = self._pending[grammar] = self._worker.submit(self._compile, grammar)
        return future

    def take_result(self, grammar: Grammar, future: Future[LLMatcher]) -> LLMatcher:
        """A new matcher, for the caller, from a future of `compile` that is done. The result goes to the cache.

        Raises BadGrammar.
        """
        self._pending.pop(grammar, None)
        error = future.exception(timeout=0)
        if isinstance(error, BadGrammar):
            outcome: LLMatcher | BadGrammar = BadGrammar(str(error))  # without the traceback, which keeps objects alive
        elif error is not None:  # a bad tokenizer, or a bug in the library: fails these requests only
            logger.error("a grammar could not be compiled", exc_info=error)
            raise BadGrammar("this grammar cannot be compiled for this model's tokenizer")
        else:
            outcome = future.result(timeout=0)
        if grammar not in self._settled:
            self._cache(grammar, outcome)
        return _matcher_of(outcome)

    def cancel(self, grammar: Grammar) -> None:
        """No request waits for the grammar any more. It is not compiled unless that has begun."""
        future = self._pending.get(grammar)
        if future is not None and future.cancel():
            del self._pending[grammar]

    def _take_abandoned_results(self) -> None:
        """Results whose requests have all been cancelled."""
        for grammar, future in [(grammar, future) for grammar, future in self._pending.items() if future.done()]:
            with suppress(BadGrammar):  # no request is left to fail
                self.take_result(grammar, future)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._tokenizer is None:
            text = self._tokenizer_json.read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids, slices=_SLICES)
        try:
            matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
        except ValueError as error:  # the schema is not a JSON object
            raise BadGrammar(_one_line(str(error))) from None
        if matcher.is_error():
            raise BadGrammar(_one_line(matcher.get_error()))
        return matcher

    def _cache(self, grammar: Grammar, outcome: LLMatcher | BadGrammar) -> None:
        self._settled[grammar] = outcome
        self._num_bytes += _num_bytes(grammar, outcome)
        while self._num_bytes > _CACHE_BYTES:
            self._num_bytes -= _num_bytes(*self._settled.popitem(last=False))


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": _WHITESPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _matcher_of(outcome: LLMatcher | BadGrammar) -> LLMatcher:
    if isinstance(outcome, BadGrammar):
        raise BadGrammar(str(outcome))
    return outcome.deep_copy()


def _num_bytes(grammar: Grammar, outcome: LLMatcher | BadGrammar) -> int:
    if isinstance(outcome, BadGrammar):
        return _BYTES_PER_REFUSAL + len(grammar.text)
    return _BYTES_PER_GRAMMAR + _BYTES_PER_CHARACTER * len(grammar.text)


def _one_line(message: str) -> str:
    """One line of bounded length: the client's own text may be part of it."""
    return " ".join(message.split())[:_MAX_ERROR_CHARACTERS]
