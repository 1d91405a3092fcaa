"""The number of usable cores, and the environment of torch's threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.backend.passes.cpu.library.thread_counts import configure_threads, num_usable_cores


@pytest.mark.parametrize(
    ("content", "quota"), [("max 100000", None), ("150000 100000", 2), ("1000 100000", 1), ("?", None)]
)
def test_usable_cores_respect_affinity_and_quota(
    content: str, quota: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cpu_max = tmp_path / "cpu.max"
    cpu_max.write_text(content)
    own = len(os.sched_getaffinity(0))
    assert num_usable_cores(cpu_max) == (own if quota is None else min(own, quota))
    assert num_usable_cores(tmp_path / "missing") == own
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert num_usable_cores(cpu_max) == 1


def test_idle_threads_sleep_unless_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    configure_threads()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert int(os.environ["OMP_NUM_THREADS"]) == num_usable_cores()
    assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == "4"
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    configure_threads()
    assert "OMP_WAIT_POLICY" not in os.environ
