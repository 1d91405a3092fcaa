"""A request with its tokens, in as many records as needed. Written only if the backend may record tokens."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from penstock.shm.messages import AskQuote, Generate, Pool
from penstock.shm.recording.records import FRAME, Kind, pack

_PART = struct.Struct("<QQIIII")
"""Frontend; request id; bytes of the whole; bytes of the message in it; offset of this part; bytes of this part."""
_PART_BYTES = (1 << 15) - FRAME.size - _PART.size

_decoder: msgspec.msgpack.Decoder[Generate | Pool | AskQuote] = msgspec.msgpack.Decoder(Generate | Pool | AskQuote)


class RecordedPrompt(NamedTuple):
    message: Generate | Pool | AskQuote
    """With a placeholder for the tokens."""
    tokens: bytes
    """Packed int32."""


def pack_prompt(frontend: int, request_id: int, message: bytes, tokens: bytes, time_s: float) -> Iterator[bytes]:
    """message is encoded with a placeholder for the tokens."""
    whole = message + tokens
    for first in range(0, len(whole), _PART_BYTES):
        part = whole[first : first + _PART_BYTES]
        head = _PART.pack(frontend, request_id, len(whole), len(message), first, len(part))
        yield pack(Kind.PROMPT, time_s, head + part)


class PromptAssembler:
    """Joins the parts. A request with a missing part is left out."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], bytes] = {}

    def add(self, body: bytes) -> tuple[int, int, RecordedPrompt] | None:
        """Return frontend, request id and prompt when this part completes it. Raises ValueError."""
        if len(body) < _PART.size:
            raise ValueError(f"a part of a prompt has {len(body)} bytes")
        frontend, request_id, total, submit_bytes, first, length = _PART.unpack_from(body)
        name = frontend, request_id
        so_far = self._parts.pop(name, b"") if first else b""
        if len(so_far) != first or length > len(body) - _PART.size:
            return None
        so_far += body[_PART.size : _PART.size + length]
        if len(so_far) < total:
            self._parts[name] = so_far
            return None
        try:
            message = _decoder.decode(so_far[:submit_bytes])
        except msgspec.MsgspecError as error:
            raise ValueError(f"a request cannot be read: {error}") from None
        return frontend, request_id, RecordedPrompt(message, so_far[submit_bytes:])
