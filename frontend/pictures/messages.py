"""Messages between a frontend and the child that decodes pictures, over `penstock.process.children`."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

MAX_MESSAGE_BYTES = 64 << 10
READY = b"ready"
"""A child's first packet."""
CPU_TIME_S = 10.0
MEMORY_BYTES = 1 << 30
"""Limits of one picture."""
_Number: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 30)]
_Numbers: TypeAlias = tuple[_Number, ...]


class PictureJob(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A picture to decode. With it come two fds: of its bytes, which the pixels replace; and of a socket for the
    result, whose end ends the work."""

    model_dir: str
    family: str
    media_type: str
    """What the client says that it is; empty if it says nothing."""
    is_base64: bool
    is_alone: bool
    """The chat has no other picture."""
    max_bytes: int
    """The most pixels that the model takes."""
    cpu_time_s: float = CPU_TIME_S


class PictureResult(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The pixels as the model's image processor returns them, without its rescaling and normalization; or an error."""

    error: Annotated[str, Meta(max_length=1024)] = ""
    shape: _Numbers = ()
    grid: tuple[_Number, _Number, _Number] = (1, 1, 1)
    text: Annotated[str, Meta(max_length=32 << 10)] = ""
    """What stands for the picture in the prompt: one image token for each run of vectors."""
    counts: _Numbers = ()
    digest: bytes = b""
    is_client_fault: bool = True
