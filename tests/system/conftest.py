"""One server for all tests of the demo model behind `penstock serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.system.processes import Command, running

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVE = ("serve", "--gpu", "none", "--port", "0", "--kv-budget", "200MB", "--tool-parser", "hermes")


@pytest.fixture(scope="session")
def served_demo() -> Iterator[str]:
    """The server's URL. It computes in fp32, where greedy tokens do not depend on the number of rows."""
    serve = Command("penstock.tools.main", *SERVE, "--dtype", "fp32")
    with running(serve):
        yield serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)
