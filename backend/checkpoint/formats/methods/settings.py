"""Types of settings in quantization_config, and checks of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

from msgspec import Meta

from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.formats.module_names import is_excluded
from penstock.backend.errors import StartupError

T = TypeVar("T")

LM_HEAD = "lm_head"
Names = Annotated[tuple[Annotated[str, Meta(max_length=512)], ...], Meta(max_length=1 << 16)]
GroupSize = Annotated[int, Meta(ge=-1, le=1 << 20)]


def all_but(names: tuple[str, ...] | None) -> Callable[[str], bool]:
    """All linears except the named ones and lm_head, which is plain in these methods."""
    return lambda module: module != LM_HEAD and not is_excluded(module, names or ())


def inputs_per_group(group_size: int | None) -> int | None:
    """Return group_size, and None for one group. Raises StartupError for 0."""
    if group_size == 0:
        raise StartupError("quantization_config.group_size is 0; it must be -1 or at least 1")
    return None if group_size == -1 else group_size


def one_of(name: str, value: T, allowed: tuple[T, ...]) -> T:
    """Return value. Raises StartupError if it is not allowed."""
    if value not in allowed:
        expected = ", ".join(str(choice) for choice in allowed)
        raise StartupError(f"quantization_config.{name} is {shorten(value)}; supported are {expected}")
    return value
