"""Names that tests of buffers on the host share."""

from __future__ import annotations

from array import array

from penstock.shm.messages import BufferContent, BufferRequest, Sampling
from tests.shm.buffers.buffer_backend import VOCAB

GREEDY = Sampling(temperature=0.0)
LOGITS, TOKENS, EMBEDDINGS = BufferContent.LOGITS, BufferContent.TOKENS, BufferContent.PROMPT_EMBEDDINGS
ROW_BYTES = 4 * VOCAB
ON_HOST = BufferRequest(2, 4 * ROW_BYTES)


def row(value: float) -> memoryview:
    return memoryview(array("f", [value]) * VOCAB)
