"""The demo model's grammar compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.backend.structured_output.grammar_cache import GrammarCache
from tests.backend.structured_output.constrained import new_compiler


@pytest.fixture
def compiler() -> Iterator[GrammarCache]:
    compiler = new_compiler()
    yield compiler
    compiler.close()
