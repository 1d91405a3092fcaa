"""The kernels' thread pool has no data races by C++'s memory model, for CPUs that reorder more than this one: ARM's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.backend.passes.cpu.library.native_library import SOURCE, find_compiler

STRESS = Path(__file__).with_name("thread_pool_stress.cpp")
FLAGS = ("-std=c++17", "-O1", "-g", "-w", "-pthread", "-march=native", "-fsanitize=thread")


def compile_stress(program: Path, kernels: Path) -> Path:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler: install g++")
    command = [compiler, *FLAGS, f"-I{kernels}", "-o", str(program), str(STRESS)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0 and "tsan" in result.stderr:
        pytest.skip("needs ThreadSanitizer: install libtsan")
    assert result.returncode == 0, result.stderr
    return program


def run_stress(program: Path, num_threads: int, spin_ns: int, num_jobs: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(num_threads), str(spin_ns), str(num_jobs)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("ThreadSanitizer cannot run here: the system places programs where it keeps its own memory")
    return result


def test_thread_pool_has_no_data_races(tmp_path: Path) -> None:
    """With threads that sleep after each job, that spin, and that do both."""
    program = compile_stress(tmp_path / "stress", SOURCE.parent)
    for num_threads, spin_ns in ((2, 0), (3, 20_000), (2, 1_000_000)):
        result = run_stress(program, num_threads, spin_ns, 2000)
        assert (result.returncode, result.stdout) == (0, "complete\n"), result.stderr


def test_sanitizer_finds_a_pool_that_does_not_wait_for_its_threads_memory(tmp_path: Path) -> None:
    """The end of a job is then no order for what its threads wrote."""
    kernels = shutil.copytree(SOURCE.parent, tmp_path / "kernels")
    pool = kernels / "step" / "thread_pool.h"
    right, weaker = "(finished, std::memory_order_release)", "(finished, std::memory_order_relaxed)"
    assert right in pool.read_text()
    pool.write_text(pool.read_text().replace(right, weaker))
    result = run_stress(compile_stress(tmp_path / "stress", kernels), 2, 1_000_000, 5000)
    assert "WARNING: ThreadSanitizer: data race" in result.stderr
