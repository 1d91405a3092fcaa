"""Options of the contract suite, which a forward pass's author runs against their own class, and the simulator's; and
what is told at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backend.passes.decoder.cpu.thread_counts import configure_torch_threads
from tests.tallies import Tallies

# Before any test module imports torch: tests share their cores with the processes they start.
configure_torch_threads()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("forward pass contract")
    group.addoption("--forward-pass", help='the pass under test: an installed name or "package.module:Class"')
    group.addoption("--model", type=Path, help="the checkpoint directory it loads")
    group = parser.getgroup("simulation")
    group.addoption("--seeds", type=int, default=10_000, help="how many worlds the simulator runs")
    group.addoption("--seed", type=int, help="the one world that it runs, telling all that happens")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tallies())
