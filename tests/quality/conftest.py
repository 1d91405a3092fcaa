"""What is made of the real files goes to a folder of the test module, not to the user's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.backend.checkpoint.gguf import cached_directories
from penstock.backend.checkpoint.quantization import cached_file
from penstock.backend.passes.shared_weights import packed_file

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        for module in (cached_directories, cached_file, packed_file):
            patch.setattr(module, "cache_directory", lambda: cache)
        yield
