"""One line at the end of the run: how many worlds, and what they met with."""

from __future__ import annotations

from collections import Counter

import pytest

_COVERED = pytest.StashKey[Counter[str]]()


@pytest.fixture
def record_simulation(pytestconfig: pytest.Config) -> Counter[str]:
    return pytestconfig.stash.setdefault(_COVERED, Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    covered = config.stash.get(_COVERED, Counter())
    if "seeds" in covered:
        told = ", ".join(f"{count:,} {name}" for name, count in sorted(covered.items()) if name != "seeds")
        terminalreporter.write_sep("-", "simulation")
        terminalreporter.write_line(f"{covered['seeds']:,} seeds: {told}")
