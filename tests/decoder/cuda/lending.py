"""Prompts of embeddings for an engine on the bench, in buffers as clients lend them, with every loan on the books."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from shm.buffer_export import BufferExporter
from shm.cuda_ipc import ExportedDeviceMemory
from shm.link import Cancellation, FrontendDeath, Submission
from shm.wire import BufferContent, BufferKind, BufferRef, BufferWish, ContentSpec, Finish, Sampling, Submit
from tests.backend.harness import GREEDY, ScriptedLink
from tests.decoder.cuda.emulators_memory import EmulatorsMemory

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

    from shm.buffer_export import ExportedBuffers, Loan
    from tests.decoder.cuda.emulated_device import EmulatedDevice

KINDS = ("read by the host", "page-locked", "on the device")
_NUM_BUFFERS, _BUFFER_BYTES = 8, 1 << 16


class LendingLink(ScriptedLink):
    """Ends a loan where `BackendLink` does: with its request's end, or before the engine hears of a cancellation or a
    client's death. The client then writes other things into the buffer at once."""

    def __init__(self, kind: str, directory: Path, embedding_size: int, gpu: EmulatedDevice) -> None:
        super().__init__()
        self.device = EmulatorsMemory(directory, gpu)
        contents = (ContentSpec(BufferContent.PROMPT_EMBEDDINGS, embedding_size, "<f4"),)
        self._kind = BufferKind.CUDA if kind == "on the device" else BufferKind.HOST
        device = None if kind == "read by the host" else self.device
        self.exporter = BufferExporter((self._kind,), contents, 1 << 30, device)
        self.clients: dict[int, ExportedBuffers] = {}
        self._loans: dict[tuple[int, int], tuple[int, Loan]] = {}
        self._num_loans = 0

    def submit(
        self,
        rows: NDArray[np.float32],
        max_tokens: int,
        request_id: int,
        *,
        frontend: int = 1,
        sampling: Sampling = GREEDY,
        **options: Any,
    ) -> Loan:
        if frontend not in self.clients:
            wish = BufferWish(_NUM_BUFFERS, _BUFFER_BYTES, (self._kind,))
            self.clients[frontend] = self.exporter.export(wish, os.getpid())
        lent = {index for (owner, _), (index, _) in self._loans.items() if owner == frontend}
        index = min(set(range(_NUM_BUFFERS)) - lent)
        self._write(frontend, index, rows.tobytes())
        ref = BufferRef(index, self._num_loans, BufferContent.PROMPT_EMBEDDINGS, len(rows))
        self._num_loans += 1
        loan = self.clients[frontend].borrow(ref, to_backend=True)
        loan.check_written()
        self._loans[frontend, request_id] = index, loan
        submit = Submit(request_id, ref, len(rows), max_tokens, sampling, **options)
        self.arrivals.append(Submission(frontend, submit, b"", embeddings=loan))
        return loan

    @property
    def num_lent(self) -> int:
        return len(self._loans)

    def receive(self) -> list[Submission | Cancellation | FrontendDeath]:
        events = super().receive()
        for event in events:
            if isinstance(event, Cancellation):
                self._end(event.frontend, event.request_id)
            elif isinstance(event, FrontendDeath):
                self._bury(event.frontend)
        return events

    def push(
        self, frontend: int, request_id: int, token_id: int, finish: Finish = Finish.NONE, *args: Any, **options: Any
    ) -> None:
        super().push(frontend, request_id, token_id, finish, *args, **options)
        if finish is not Finish.NONE:
            self._end(frontend, request_id)

    def close(self) -> None:
        """All clients leave; nothing is lent, locked or allocated then."""
        for frontend in list(self.clients):
            self._bury(frontend)
        self.exporter.close()

    def _end(self, frontend: int, request_id: int) -> None:
        if (lent := self._loans.pop((frontend, request_id), None)) is not None:
            index, loan = lent
            self.clients[frontend].give_back(loan)
            self._write(frontend, index, np.full(_BUFFER_BYTES // 4, np.nan, np.float32).tobytes())

    def _bury(self, frontend: int) -> None:
        client = self.clients.pop(frontend)
        for key in [key for key in self._loans if key[0] == frontend]:
            del self._loans[key]
        self.exporter.take_leave(client, has_closed=True)
        assert client.num_lent == client.num_returned
        self.dead.add(frontend)

    def _write(self, frontend: int, index: int, data: bytes) -> None:
        memory = self.clients[frontend]._memory
        if isinstance(memory, ExportedDeviceMemory):
            self.device.poke(memory._pointers[index], data)
        else:
            memory.write(index, 0, len(data), memoryview(data))
