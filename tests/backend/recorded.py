"""A bench whose engine is recorded, for tests of the recorder and of what reads its ring."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from penstock.backend.engine.recorder import Recorder
from penstock.commands.recorder.history import Life, read_history
from penstock.shm.memory.ring import MIN_RING_BYTES, RingReader, RingWriter, create_fd
from penstock.shm.messages import PROTOCOL_VERSION
from penstock.shm.recording.events import BackendStarted
from penstock.shm.recording.file import Recording
from penstock.shm.recording.records import FORMAT_VERSION, unpack
from penstock.shm.recording.steps import Row
from tests.backend.harness import Bench

if TYPE_CHECKING:
    from penstock.backend.engine.steps.launched_step import PageSaves
    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.scheduling.step_plan import Plan


class Recorded:
    """A bench whose engine is recorded, and the plans that it launched."""

    def __init__(self, *, with_tokens: bool = False, pid: int = 1, wall_s: float = 0.0, **sizes: Any) -> None:
        self.fd = create_fd(MIN_RING_BYTES)
        self.bench = Bench(**sizes)
        started = BackendStarted(
            FORMAT_VERSION, pid, wall_s, "fake", 8, 16, 64, 4, 256, 97, 1000, 1, has_tokens=with_tokens
        )
        started = replace(started, protocol_version=PROTOCOL_VERSION)
        self._writer = RingWriter(self.fd)
        self.recorder = Recorder.begin(self._writer, started)
        self.bench.engine._recorder = self.bench.requests.table.recorder = self.recorder
        self.plans: list[list[Row]] = []
        launch = self.bench.executor.launch

        def note_and_launch(plan: Plan, batch: StepBatch, saves: PageSaves) -> None:
            self.plans.append(
                [Row(row.sequence.slot or 0, row.sequence.order, row.end, row.end - row.start) for row in plan.rows()]
            )
            launch(plan, batch, saves)

        self.bench.executor.launch = note_and_launch  # type: ignore[method-assign]

    def records(self) -> Recording:
        reader = RingReader(self.fd)
        recording = Recording([unpack(record) for record in reader.read().records])
        reader.close()
        return recording

    def life(self) -> Life:
        recording = self.records()
        (life,) = read_history(recording)
        assert recording.problem == ""
        return life

    def close(self) -> None:
        self.bench.close()
        self._writer.close()
        os.close(self.fd)
