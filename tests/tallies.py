"""What tests counted, told at the end of a run: worlds that were simulated, kernels that were compiled and emulated.

Counts travel as properties of the tests' reports, so that they come from the workers of pytest-xdist too. Those of
tests that fail do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

SIMULATED = "simulated"
"""The property of a test that ran worlds: how many "seeds", and how often each thing happened in them."""
COMPILED = "kernels compiled"
"""The property of a test that compiled kernels: (architecture, kernel) of each."""
_EMULATED = "kernels emulated"

_launches: Counter[tuple[str, str]] = Counter()


def note_launch(mode: str, kernel: str) -> None:
    """The emulator ran a kernel of the project's in the test that is running."""
    _launches[mode, kernel] += 1


class Tallies:
    """A plugin of pytest's."""

    def __init__(self) -> None:
        self._simulated: Counter[str] = Counter()
        self._compiled: set[tuple[str, str]] = set()
        self._launches: Counter[tuple[str, str]] = Counter()
        self._num_emulating_tests = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield
        if _launches:
            item.user_properties.append((_EMULATED, [(*launched, count) for launched, count in _launches.items()]))

    def pytest_runtest_teardown(self) -> None:
        _launches.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or not report.passed:
            return
        for name, value in report.user_properties:
            if name == SIMULATED:
                self._simulated.update(value)  # type: ignore[call-overload]
            elif name == COMPILED:
                self._compiled.update(map(tuple, value))  # type: ignore[call-overload]
            elif name == _EMULATED:
                self._num_emulating_tests += 1
                for mode, kernel, count in value:  # type: ignore[attr-defined]
                    self._launches[mode, kernel] += count

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if "seeds" in self._simulated:
            terminalreporter.write_sep("-", "simulation")
            counts = sorted((name, count) for name, count in self._simulated.items() if name != "seeds")
            told = ", ".join(f"{count:,} {name}" for name, count in counts)
            terminalreporter.write_line(f"{self._simulated['seeds']:,} seeds: {told}")
        lines = [*self._compilation(), *self._emulation()]
        if lines:
            terminalreporter.write_sep("-", "kernels")
            for line in lines:
                terminalreporter.write_line(line)

    def _compilation(self) -> Iterator[str]:
        if self._compiled:
            architectures, kernels = (sorted(set(each)) for each in zip(*self._compiled, strict=True))
            where = ", ".join(architectures)
            yield f"compiled: {len(self._compiled):,} cases, {len(kernels):,} kernels for {where}"

    def _emulation(self) -> Iterator[str]:
        if self._launches:
            by_mode: Counter[str] = Counter()
            for (mode, _), count in self._launches.items():
                by_mode[mode] += count
            modes = ", ".join(f'{count:,} in the mode "{mode}"' for mode, count in sorted(by_mode.items()))
            kernels = {kernel for _, kernel in self._launches}
            yield f"emulated: {self._num_emulating_tests:,} cases, {len(kernels):,} kernels; launches: {modes}"
