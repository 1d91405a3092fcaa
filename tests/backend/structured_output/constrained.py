"""Requests with constraints on the test bench, with the demo model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import penstock.backend.demo_model
from penstock.backend.structured_output.compile_pool import CompilePool
from penstock.backend.structured_output.grammar_cache import GrammarCache
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.shm.messages import Constraints, Finish, Grammar
from tests.backend.harness import Bench

TOKENIZER_JSON = Path(next(iter(penstock.backend.demo_model.__path__))) / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(TOKENIZER_JSON))
EOS = 0
VOCAB_SIZE = TOKENIZER.get_vocab_size()
DIGITS = Grammar("regex", "[0-9]{5,8}")
PROMPT = [5, 6, 7, 8, 9]


def new_compiler(vocab_size: int = VOCAB_SIZE, tokenizer_json: Path = TOKENIZER_JSON) -> GrammarCache:
    """With real children, which start with the first grammar."""
    return GrammarCache(CompilePool(tokenizer_json, vocab_size, (EOS,)))


def new_bench(compiler: GrammarCache, max_waiting: int = 100, **options: Any) -> Bench:
    return Bench(vocab_size=VOCAB_SIZE, grammar_queue=GrammarQueue(compiler, lambda: None, max_waiting), **options)


def ask(bench: Bench, request_id: int, grammar: Grammar | None = DIGITS, max_tokens: int = 12, **options: Any) -> None:
    fields = {name: options.pop(name) for name in list(options) if name in Constraints.__struct_fields__}
    constraints = Constraints(grammar=grammar, **fields)
    bench.submit(PROMPT, max_tokens, request_id=request_id, stop_ids=(EOS,), constraints=constraints, **options)


def compile_all(bench: Bench) -> None:
    """Turn the engine until no request waits for its grammar."""
    bench.engine.turn()
    for waiting in list(bench.requests.table.grammar_queue._waiting.values()):
        waiting.future.exception(timeout=30)
    while len(bench.requests.table.grammar_queue._done) < bench.requests.table.grammar_queue.num_waiting:
        pass  # the compiler's thread is about to report it
    bench.engine.turn()


def tokens_of(written: str) -> list[int]:
    return TOKENIZER.encode(written, add_special_tokens=False).ids


def text(bench: Bench, request_id: int) -> str:
    received = bench.received(request_id)
    assert received.finishes == [Finish.STOP]
    return TOKENIZER.decode(received.token_ids)
