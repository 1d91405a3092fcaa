"""Prompts of embeddings for an engine on the bench, in shared buffers that clients lend. Every loan is recorded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from penstock.shm.buffers.buffer_export import BufferExporter
from penstock.shm.buffers.cuda_ipc import ExportedDeviceMemory
from penstock.shm.link.events import Cancellation, FrontendDeath, Submission
from penstock.shm.messages import (
    BufferContent,
    BufferKind,
    BufferRef,
    BufferRequest,
    ContentSpec,
    Finish,
    Generate,
    Sampling,
)
from tests.backend.harness import GREEDY, ScriptedLink
from tests.backend.passes.cuda.emulator_shared_device import EmulatorSharedDevice

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

    from penstock.shm.buffers.buffer_export import ExportedBuffers, Loan
    from tests.backend.passes.cuda.emulated_device import EmulatedDevice

KINDS = ("read by the host", "page-locked", "on the device")
_NUM_BUFFERS, _BUFFER_BYTES = 8, 1 << 16


class LendingLink(ScriptedLink):
    """Ends loans when `BackendLink` does: at the end of the request, or before the engine receives a cancellation or a
    client's death. The client then overwrites the buffer at once."""

    def __init__(self, kind: str, directory: Path, embedding_size: int, vocab_size: int, gpu: EmulatedDevice) -> None:
        super().__init__()
        self.device = EmulatorSharedDevice(directory, gpu)
        contents = (
            ContentSpec(BufferContent.PROMPT_EMBEDDINGS, embedding_size, "<f4"),
            ContentSpec(BufferContent.LOGITS, vocab_size, "<f4"),
        )
        self.logits: dict[int, NDArray[np.float32]] = {}
        """Request → its logits, [num_logits, vocab]."""
        self._vocab_size = vocab_size
        self._kind = BufferKind.CUDA if kind == "on the device" else BufferKind.HOST
        device = None if kind == "read by the host" else self.device
        self.exporter = BufferExporter((self._kind,), contents, 1 << 30, device)
        self.clients: dict[int, ExportedBuffers] = {}
        self._loans: dict[tuple[int, int], dict[int, Loan]] = {}
        """(Frontend, request) → index of a buffer → its loan."""
        self._num_loans = 0

    def submit(
        self,
        rows: NDArray[np.float32],
        max_tokens: int,
        request_id: int,
        *,
        frontend: int = 1,
        sampling: Sampling = GREEDY,
        num_logits: int = 0,
        **options: Any,
    ) -> Loan:
        """Submit a prompt of embeddings and return its loan."""
        if frontend not in self.clients:
            buffer_request = BufferRequest(_NUM_BUFFERS, _BUFFER_BYTES, (self._kind,))
            self.clients[frontend] = self.exporter.export(buffer_request, os.getpid())
        index = self._free_buffer(frontend)
        self._write(frontend, index, rows.tobytes())
        ref, loan = self._lend(frontend, request_id, index, BufferContent.PROMPT_EMBEDDINGS, len(rows))
        loan.check_written()
        output = None
        if num_logits:
            _, output = self._lend(frontend, request_id, self._free_buffer(frontend), BufferContent.LOGITS, num_logits)
        message = Generate(
            request_id=request_id,
            tokens=ref,
            num_prompt_tokens=len(rows),
            max_tokens=max_tokens,
            sampling=sampling,
            **options,
        )
        self.arrivals.append(Submission(frontend, message, b"", output, loan))
        return loan

    def _free_buffer(self, frontend: int) -> int:
        lent = {index for (owner, _), loans in self._loans.items() if owner == frontend for index in loans}
        return min(set(range(_NUM_BUFFERS)) - lent)

    def _lend(
        self, frontend: int, request_id: int, index: int, content: BufferContent, num_rows: int
    ) -> tuple[BufferRef, Loan]:
        ref = BufferRef(index, self._num_loans, content, num_rows)
        self._num_loans += 1
        loan = self.clients[frontend].borrow(ref, to_backend=content.to_backend)
        self._loans.setdefault((frontend, request_id), {})[index] = loan
        return ref, loan

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
        """Let all clients leave; nothing may be lent, page-locked or allocated afterwards."""
        for frontend in list(self.clients):
            self._bury(frontend)
        self.exporter.close()

    def _end(self, frontend: int, request_id: int) -> None:
        for index, loan in self._loans.pop((frontend, request_id), {}).items():
            returned = self.clients[frontend].give_back(loan)
            if returned.num_rows:
                data = self._read(frontend, index, returned.num_rows * 4 * self._vocab_size)
                self.logits[request_id] = np.frombuffer(data, np.float32).reshape(-1, self._vocab_size)
            self._write(frontend, index, np.full(_BUFFER_BYTES // 4, np.nan, np.float32).tobytes())

    def _bury(self, frontend: int) -> None:
        client = self.clients.pop(frontend)
        for key in [key for key in self._loans if key[0] == frontend]:
            del self._loans[key]
        self.exporter.release_client(client, has_closed=True)
        assert client.num_lent == client.num_returned
        self.dead.add(frontend)

    def _write(self, frontend: int, index: int, data: bytes) -> None:
        memory = self.clients[frontend]._memory
        if isinstance(memory, ExportedDeviceMemory):
            self.device.poke(memory._pointers[index], data)
        else:
            memory.write(index, 0, len(data), memoryview(data))

    def _read(self, frontend: int, index: int, num_bytes: int) -> bytes:
        return self.clients[frontend]._memory.read(index, 0, num_bytes)
