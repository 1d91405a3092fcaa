"""Options of the contract suite and of the simulator, and a summary of counts at the end of a run."""

from __future__ import annotations

import gc
import os
import signal
import sys
import zlib

import pytest
from hypothesis import settings

from penstock.backend.passes.cpu.library.thread_counts import configure_threads
from penstock.tools.forward_pass_contract import options as contract_options
from tests.real_models import minilm_dir, real_gguf  # noqa: F401 - fixtures
from tests.tallies import Tallies
from tests.temporary import TemporaryFolder

# Before any test module imports torch: tests share their cores with the processes they start.
configure_threads()
# Servers that tests start find our modules compiled, also where the variable is set: half a second less for each.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# HTTP clients look for authorities here, where none is, instead of reading all of the system's: 20 ms for each client.
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)
# No test asserts a time.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")
# Collection makes millions of objects that stay; pytest_collection_finish turns the collector on again.
gc.disable()


collect_ignore = ["clients"]  # they run in a virtual environment of their own: make test-clients


def pytest_addoption(parser: pytest.Parser) -> None:
    contract_options.pytest_addoption(parser)
    group = parser.getgroup("simulation")
    group.addoption("--seeds", type=int, default=400, help="number of worlds that the simulator runs")
    group.addoption("--seed", type=int, help="the only world that it runs, with a log of everything that happens")


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets its background commands ignore SIGINT; processes that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(TemporaryFolder())
    config.pluginmanager.register(Tallies())


# Files that take longest: with several workers they start first, so that none of them ends the run alone.
_LONG_FILES = [
    "tests/tools/gpu/test_command.py",
    "tests/simulation/test_simulation.py",
    "tests/system/test_chaos.py",
    "tests/quality/test_perplexity.py",
    "tests/backend/passes/decoder/test_deterministic_engine.py",
    "tests/serve/test_hold_weights.py",
    "tests/backend/passes/cuda/kernels/test_compile.py",
    "tests/system/test_faults.py",
    "tests/backend/passes/decoder/test_decoder_pass.py",
    "tests/system/test_resumption.py",
    "tests/backend/passes/cuda/test_pass_on_emulator.py",
    "tests/serve/upgrade/test_upgrade.py",
    "tests/backend/passes/cuda/test_combinations.py",
    "tests/backend/passes/cpu/arm/test_arm_kernels.py",
    "tests/cuda_emulator/test_rounding.py",
    "tests/tools/bench/test_serving.py",
    "tests/backend/passes/cuda/test_deterministic_pass.py",
    "tests/system/test_chat_page.py",
    "tests/backend/passes/transformers_model/test_transformers_pass.py",
    "tests/system/test_wheel.py",
    "tests/system/test_runtime_lora.py",
    "tests/frontend/test_main.py",
    "tests/system/test_real_tools.py",
    "tests/system/test_lingering.py",
    "tests/tools/demo_model/test_demo_model.py",
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give workers the long files first, then the others mixed: those that wait beside those that compute."""
    if not hasattr(config, "workerinput"):
        return
    ranks = {path: rank for rank, path in enumerate(_LONG_FILES)}

    def turn(item: pytest.Item) -> tuple[int, int]:
        path = item.nodeid.partition("::")[0]
        return ranks.get(path, len(ranks)), zlib.crc32(path.encode())

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """Keep modules and tests out of the garbage collector's sight: each full collection would visit all of them.

    Tests' tensors are small: a second thread of torch's costs more to wake than it computes. Servers have all threads.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
