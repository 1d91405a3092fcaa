"""The table of models that sleep: who writes what, and who reads it."""

from __future__ import annotations

import os

from penstock.shm.memory.model_table import ModelState, ModelTable


def test_uses_of_all_workers_add_up_and_a_restarted_worker_has_none() -> None:
    fd, owner = ModelTable.create(2)
    first, second = (ModelTable.of_worker(fd, 2, worker) for worker in range(2))
    first.note_use(3, 2, 100, 900)
    second.note_use(3, 1, 50)
    assert owner.uses(3) == (3, 100, 900)
    assert owner.uses(2) == (0, 0, 0)
    ModelTable.of_worker(fd, 2, 0)
    assert owner.uses(3) == (1, 50, 0)
    os.close(fd)


def test_workers_read_state_wake_time_and_failure() -> None:
    fd, owner = ModelTable.create(1)
    worker = ModelTable.of_worker(fd, 1, 0)
    assert (worker.state(0), worker.wake_s(0), worker.failures(0)) == (ModelState.ASLEEP, None, 0)
    owner.set_state(0, ModelState.AWAKE, wake_s=1.25)
    assert (worker.state(0), worker.wake_s(0), worker.state(1)) == (ModelState.AWAKE, 1.25, ModelState.ASLEEP)
    owner.fail(0, "é" * 400, retry_after_s=60.0)
    assert worker.state(0) is ModelState.ASLEEP
    assert worker.reason(0).startswith("é" * 100)
    assert 0 < worker.seconds_to_retry(0) <= 60
    owner.fail(0, "short", retry_after_s=0.0)
    assert (worker.reason(0), worker.failures(0), worker.seconds_to_retry(0)) == ("short", 2, 0.0)
    os.close(fd)
