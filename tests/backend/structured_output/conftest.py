"""The demo model's grammar compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.backend.structured_output.grammar_compiler import GrammarCompiler
from tests.backend.structured_output.constrained import EOS, TOKENIZER_JSON, VOCAB_SIZE


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOKENIZER_JSON, VOCAB_SIZE, (EOS,))
    yield compiler
    compiler.close()
