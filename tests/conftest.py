"""Options of the contract suite and of the simulator, and a summary of counts at the end of a run."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile

import pytest

from penstock.backend.passes.decoder.cpu.thread_counts import configure_torch_threads
from penstock.tools.forward_pass_contract import options as contract_options
from tests.tallies import Tallies

# Before any test module imports torch: tests share their cores with the processes they start.
configure_torch_threads()
# Servers that tests start find our modules compiled, also where the variable is set: half a second less for each.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Collection makes millions of objects that stay; pytest_collection_finish turns the collector on again.
gc.disable()


collect_ignore = ["clients"]  # they run in a virtual environment of their own: make test-clients


def pytest_addoption(parser: pytest.Parser) -> None:
    contract_options.pytest_addoption(parser)
    group = parser.getgroup("simulation")
    group.addoption("--seeds", type=int, default=1_200, help="number of worlds that the simulator runs")
    group.addoption("--seed", type=int, help="the only world that it runs, with a log of everything that happens")


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets its background commands ignore SIGINT; processes that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Servers that tests start keep no state in the user's directories.
    state_dir = tempfile.mkdtemp(prefix="ps-state-")
    os.environ["XDG_STATE_HOME"] = state_dir
    config.add_cleanup(lambda: shutil.rmtree(state_dir, ignore_errors=True))
    config.pluginmanager.register(Tallies())


def pytest_collection_finish() -> None:
    """Keep modules and tests out of the garbage collector's sight: each full collection would visit all of them."""
    gc.collect()
    gc.freeze()
    gc.enable()
