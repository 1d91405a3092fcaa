"""Names that tests of buffers on a device share."""

from __future__ import annotations

from penstock.shm.messages import BufferKind, BufferRequest
from tests.shm.buffers.buffer_backend import BLOCK

ON_DEVICE = BufferRequest(2, BLOCK, (BufferKind.CUDA,))
ON_HOST = BufferRequest(2, BLOCK, (BufferKind.HOST,))
STREAM = 7
