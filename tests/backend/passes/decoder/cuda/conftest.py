"""Settings of tests on the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def torch_on_one_thread() -> Iterator[None]:
    """Let torch compute products of tiny models on one thread: two wait for each other longer than they compute."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
