"""When a silent heartbeat means a hang, and when it does not."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from penstock.process.heartbeat import HangWatch, Heartbeat

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def heartbeat() -> Iterator[Heartbeat]:
    heartbeat = Heartbeat.create()
    yield heartbeat
    heartbeat.close()


def looks(watch: HangWatch, *times_s: float) -> list[bool]:
    base_s = time.monotonic()
    return [watch.is_hung(base_s + after_s) for after_s in times_s]


def test_silence_counts_only_after_the_first_beat_and_until_the_next(heartbeat: Heartbeat) -> None:
    watch = HangWatch(heartbeat, 5.0, longest_step_s=2.0)
    assert looks(watch, *range(100)) == [False] * 100  # it starts
    heartbeat.beat()
    watch = HangWatch(heartbeat, 5.0, longest_step_s=2.0)
    assert looks(watch, 1, 2, 3, 4, 5, 6.1) == [False] * 5 + [True]
    heartbeat.beat()
    assert not watch.is_hung(time.monotonic() + 7)
    assert watch.silent_s == 0.0


def test_watcher_that_was_stopped_too_blames_nobody(heartbeat: Heartbeat) -> None:
    heartbeat.beat()
    watch = HangWatch(heartbeat, 5.0, longest_step_s=2.0)
    assert looks(watch, 1, 1000, 1001) == [False] * 3
    assert watch.silent_s < 5.0


def test_restarted_child_begins_without_a_beat(heartbeat: Heartbeat) -> None:
    heartbeat.beat()
    watch = HangWatch(heartbeat, 1.0, longest_step_s=2.0)
    looks(watch, 1, 2)
    watch.restart()
    assert heartbeat.last_ns == 0
    assert looks(watch, 3, 4, 50) == [False] * 3


def test_beats_written_through_another_mapping_are_seen(heartbeat: Heartbeat) -> None:
    other = Heartbeat(os.dup(heartbeat.fd))
    other.beat()
    other.close()
    assert 0 < heartbeat.last_ns <= time.monotonic_ns()
