"""Compiles grammars in a thread, within limits of size and time. `constraints` applies the compiled grammar.

llguidance does the work (https://github.com/guidance-ai/llguidance): it drops the interpreter's lock while it compiles.
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
    step_lexer_fuel=200_000,  # about 15 ms in one mask, at worst
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=100_000,
    verbose_errors=False,  # they would show one client's schema in a log
)
_WHITESPACE = r" ?|\n {0,24}"
"""Between the parts of a JSON text: as models write it, on one line or indented, and never without end."""
_SLICES = ["[a-z]+", *LLTokenizer.general_slices()]
"""Tokens that are masked as one where all of them are allowed, the first that matches; else each is looked at, and that
takes a millisecond for 100,000. Words are for names, and for text that is not as JSON's."""
_CACHE_BYTES = 64 << 20
_BYTES_PER_GRAMMAR, _BYTES_PER_CHARACTER = 32 << 10, 512
"""Of memory that a compiled grammar takes, and takes besides for each character of its text: measured on expressions of
a few characters and schemas of a few hundred. An estimate, and so the cache's bound is."""
_BYTES_PER_REFUSAL = 1 << 10
MAX_PENDING = 256
_SHOWN_CHARACTERS = 300


class BadGrammar(Exception):
    """The grammar does not compile, or only beyond the limits; the text says why in a line for its author."""


class TooManyGrammars(Exception):
    """MAX_PENDING others are being compiled."""


class GrammarCompiler:
    """One thread that compiles, and a cache of what came of it. Owned by the main thread, which alone calls it."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Reads the tokenizer when the first grammar comes, in the thread."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._pending: dict[Grammar, Future[LLMatcher]] = {}
        self._settled: OrderedDict[Grammar, LLMatcher | BadGrammar] = OrderedDict()
        """What does not compile is kept as well: it may have taken long to find out."""
        self._num_bytes = 0

    def compiled(self, grammar: Grammar) -> LLMatcher | None:
        """A matcher of the caller's own, at its beginning; None where it must be compiled first. Raises BadGrammar."""
        if grammar not in self._settled:
            return None
        self._settled.move_to_end(grammar)
        return _unwrapped(self._settled[grammar])

    def compile(self, grammar: Grammar) -> Future[LLMatcher]:
        """Begins to compile, or joins who has begun. Done in the worker's thread; `finished` takes it in.

        The future raises BadGrammar. Raises TooManyGrammars.
        """
        future = self._pending.get(grammar)
        if future is None:
            if len(self._pending) >= MAX_PENDING:
                self._take_in_abandoned()
            if len(self._pending) >= MAX_PENDING:
                raise TooManyGrammars
            future = self._pending[grammar] = self._worker.submit(self._compile, grammar)
        return future

    def finished(self, grammar: Grammar, future: Future[LLMatcher]) -> LLMatcher:
        """Of what `compile` returned, and is done: a matcher of the caller's own; what came of the grammar is kept.

        Raises BadGrammar.
        """
        self._pending.pop(grammar, None)
        error = future.exception(timeout=0)
        if isinstance(error, BadGrammar):
            outcome: LLMatcher | BadGrammar = BadGrammar(str(error))  # without the trace, which holds much
        elif error is not None:  # of the tokenizer, or a fault in the library: whoever asks is told, and nobody else
            logger.error("a grammar could not be compiled", exc_info=error)
            raise BadGrammar("grammars cannot be compiled for this model's tokenizer, or not this one")
        else:
            outcome = future.result(timeout=0)
        if grammar not in self._settled:
            self._keep(grammar, outcome)
        return _unwrapped(outcome)

    def give_up(self, grammar: Grammar) -> None:
        """Nobody waits for it any more: unless it has been begun, it is not compiled."""
        future = self._pending.get(grammar)
        if future is not None and future.cancel():
            del self._pending[grammar]

    def _take_in_abandoned(self) -> None:
        """What has been compiled since all who asked for it left."""
        for grammar, future in [(grammar, future) for grammar, future in self._pending.items() if future.done()]:
            with suppress(BadGrammar):  # there is nobody to be told
                self.finished(grammar, future)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._tokenizer is None:
            text = self._tokenizer_json.read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids, slices=_SLICES)
        try:
            matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
        except ValueError as error:  # a schema that is no JSON object
            raise BadGrammar(_shown(str(error))) from None
        if matcher.is_error():
            raise BadGrammar(_shown(matcher.get_error()))
        return matcher

    def _keep(self, grammar: Grammar, outcome: LLMatcher | BadGrammar) -> None:
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


def _unwrapped(outcome: LLMatcher | BadGrammar) -> LLMatcher:
    if isinstance(outcome, BadGrammar):
        raise BadGrammar(str(outcome))
    return outcome.deep_copy()


def _num_bytes(grammar: Grammar, outcome: LLMatcher | BadGrammar) -> int:
    if isinstance(outcome, BadGrammar):
        return _BYTES_PER_REFUSAL + len(grammar.text)
    return _BYTES_PER_GRAMMAR + _BYTES_PER_CHARACTER * len(grammar.text)


def _shown(message: str) -> str:
    """One line, and not too long: parts of it are the client's own text."""
    return " ".join(message.split())[:_SHOWN_CHARACTERS]
