"""Reads a checkpoint's JSON files into checked Structs. Every error is one line naming file, field and value."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.backend.errors import StartupError

MAX_JSON_BYTES = 64 << 20
"""Largest file read as JSON. An index of hundreds of thousands of tensors is smaller."""

T = TypeVar("T")

LFS_MARK = b"version https://git-lfs.github.com/spec/"
"""Beginning of the small file that git leaves in place of a large file that is not downloaded yet."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CONSTANTS = (b"NaN", b"Infinity")
_ERROR_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_PATH_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+)\]")


def read_bytes(path: Path) -> bytes:
    """The whole file. Raises StartupError if it is missing, unreadable or larger than MAX_JSON_BYTES."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_JSON_BYTES:
            raise StartupError(f"{path} has {num_bytes} bytes; at most {MAX_JSON_BYTES} are read")
        content = path.read_bytes()
    except FileNotFoundError:
        raise StartupError(f"{path} does not exist") from None
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None
    refuse_lfs_pointer(content, path)
    return content


def refuse_lfs_pointer(beginning: bytes, path: Path) -> None:
    """Raises StartupError for the beginning of a file that git-lfs has not downloaded."""
    if beginning.startswith(LFS_MARK):
        raise StartupError(f"{path} is a git-lfs pointer and not the file itself; run git lfs pull in {path.parent}")


def read_json_object(path: Path) -> dict[str, Any]:
    """The file's JSON object. Raises StartupError."""
    return decode_json_object(read_bytes(path), path)


def decode_json_object(data: bytes | memoryview, where: object) -> dict[str, Any]:
    """The JSON object in data. Raises StartupError; its message begins with `where`."""
    content = bytes(data).removeprefix(_BYTE_ORDER_MARK)
    # msgspec raises these four for invalid input; RecursionError for nesting beyond the interpreter's limit.
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if (values := _decode_with_constants(content)) is not None:
            return values
        raise StartupError(f"{where} is not a JSON object: {error}") from None


def _decode_with_constants(content: bytes) -> dict[str, Any] | None:
    """Decode what Python's json writes beyond the standard: NaN, Infinity and -Infinity. None for anything else."""
    if not any(constant in content for constant in _CONSTANTS):
        return None
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def decode_without_twins(data: bytes, where: object) -> dict[str, Any]:
    """Like `decode_json_object`, but refuses an object, at any depth, with a duplicate key: no standard says which
    value counts."""
    values = decode_json_object(data, where)
    try:
        # The default parse_int raises for thousands of digits.
        json.loads(data, object_pairs_hook=partial(_refuse_twins, where=where), parse_int=float)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{where} is not a JSON object: {error}") from None
    return values


def convert(values: dict[str, Any], into: type[T], where: object) -> T:
    """Convert to the Struct `into`, checking types and bounds. Raises StartupError naming the field and its value."""
    try:
        return msgspec.convert(values, into)
    except msgspec.ValidationError as error:
        match = _ERROR_PATH.match(str(error))
        what, path = (match["what"], match["path"]) if match else (str(error), None)
        if not path:
            raise StartupError(f"{where}: {what[:1].lower()}{what[1:]}") from None
        raise StartupError(
            f"{where}: {path[1:]} is {shorten(_look_up(values, path))}; {what[:1].lower()}{what[1:]}"
        ) from None


def read_fields(path: Path, into: type[T]) -> T:
    """The fields of the file that the Struct `into` has. Others, such as a vocabulary, cost no objects.

    Raises StartupError.
    """
    content = read_bytes(path)
    try:
        return msgspec.json.decode(content, type=into)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # said with the value, or the place
        return convert(decode_json_object(content, path), into, path)


def shorten(value: object) -> str:
    """value's repr, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refuse_twins(pairs: list[tuple[str, object]], where: object) -> None:
    """Check pairs for duplicate keys; the object itself is dropped."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise StartupError(f"{where}: {shorten(key)} occurs twice")
        seen.add(key)


def _look_up(values: Any, path: str) -> Any:
    # msgspec writes [...] for a key of a mapping, without the key.
    for step in _PATH_STEP.finditer(path.partition("[...]")[0]):
        values = values[step["key"]] if step["key"] else values[int(step["index"])]
    return values
