"""The demo model's grammar compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.backend.structured_output.grammar_compiler import GrammarCompiler
from tests.backend.structured_output.constrained import new_compiler


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = new_compiler()
    yield compiler
    compiler.close()
