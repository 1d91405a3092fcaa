"""Counts reported at the end of a test run: simulated worlds, compiled kernels and emulated kernels.

Counts are properties of test reports, so they arrive from pytest-xdist workers too. Counts of failed tests are ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

SIMULATED = "simulated"
"""Test property of simulated worlds: the number of "seeds", and how often each event happened."""
COMPILED = "kernels compiled"
"""Test property of compiled kernels: (architecture, kernel) of each."""
_EMULATED = "kernels emulated"

_launches: Counter[tuple[str, str]] = Counter()


def note_launch(mode: str, kernel: str) -> None:
    """Count a kernel that the emulator ran in the current test."""
    _launches[mode, kernel] += 1


class Tallies:
    """The pytest plugin."""

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
            text = ", ".join(f"{count:,} {name}" for name, count in counts)
            terminalreporter.write_line(f"{self._simulated['seeds']:,} seeds: {text}")
        lines = [*self._compilation(), *self._emulation()]
        if lines:
            terminalreporter.write_sep("-", "kernels")
            for line in lines:
                terminalreporter.write_line(line)

    def _compilation(self) -> Iterator[str]:
        if self._compiled:
            architectures, kernels = (sorted(set(each)) for each in zip(*self._compiled, strict=True))
            where = ", ".join(architectures)
            yield f"compiled, now or before: {len(self._compiled):,} cases, {len(kernels):,} kernels for {where}"

    def _emulation(self) -> Iterator[str]:
        if self._launches:
            by_mode: Counter[str] = Counter()
            for (mode, _), count in self._launches.items():
                by_mode[mode] += count
            modes = ", ".join(f'{count:,} in the mode "{mode}"' for mode, count in sorted(by_mode.items()))
            kernels = {kernel for _, kernel in self._launches}
            yield f"emulated: {self._num_emulating_tests:,} cases, {len(kernels):,} kernels; launches: {modes}"
