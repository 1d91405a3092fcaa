"""A GGUF file in parts, so that each can be damaged alone: version, counts, metadata, tensors' places, data."""

from __future__ import annotations

import copy
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.gguf.header import TYPE_NAMES

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

_ALIGNMENT = 32
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _F32, _STRING, _ARRAY = 4, 6, 8, 9
_TYPE_NUMBERS = {name: number for number, name in TYPE_NAMES.items()}
_SIZES = (0, 1, 2, 3, 31, 65, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_NUMBERS = (*_SIZES, -1, -(1 << 31), 0.5, float("nan"), float("inf"), 1e308, 1e-40)
_TEXTS = ("", "x", "llama", "mamba", "\0\n\x1b[31m", "y" * 70_000, "{{ 9 ** (9 ** 9) }}", "{% for", "../../x")
_NAMES = ("output.weight", "blk.99999.x.weight")


@dataclass
class Entry:
    """A metadata key, with the bytes of its value: claims can be wrong."""

    key: str
    type_number: int
    content: bytes


@dataclass
class TensorInfo:
    name: str
    dims: list[int]
    type_name: str
    offset: int = 0
    num_dims: int | None = None
    """Claimed number of dimensions; None: the true one."""
    type_number: int | None = None


@dataclass
class GgufFile:
    version: int = 3
    entries: list[Entry] = field(default_factory=list)
    tensors: list[TensorInfo] = field(default_factory=list)
    data: bytes = b""
    counts: tuple[int | None, int | None] = (None, None)
    """Claimed numbers of tensors and of keys; None: the true one."""

    def add(self, key: str, value: Any) -> None:
        self.entries.append(Entry(key, *_encode(value)))

    def add_tensor(self, info: TensorInfo, content: bytes) -> None:
        info.offset = len(self.data)
        self.tensors.append(info)
        self.data += content + bytes(-len(content) % _ALIGNMENT)

    def __bytes__(self) -> bytes:
        num_tensors, num_keys = self.counts
        parts = [b"GGUF", struct.pack("<I", self.version)]
        parts += [_u64(len(self.tensors) if num_tensors is None else num_tensors)]
        parts += [_u64(len(self.entries) if num_keys is None else num_keys)]
        for entry in self.entries:
            parts += [_text(entry.key), struct.pack("<I", entry.type_number), entry.content]
        for info in self.tensors:
            number = _TYPE_NUMBERS[info.type_name] if info.type_number is None else info.type_number
            num_dims = len(info.dims) if info.num_dims is None else info.num_dims
            parts += [_text(info.name), struct.pack("<I", num_dims), *map(_u64, info.dims)]
            parts += [struct.pack("<I", number), _u64(info.offset)]
        header = b"".join(parts)
        return header + bytes(-len(header) % _ALIGNMENT) + self.data


def _u64(number: int) -> bytes:
    return struct.pack("<Q", number % (1 << 64))


def _text(text: str) -> bytes:
    content = text.encode()
    return _u64(len(content)) + content


def _encode(value: Any) -> tuple[int, bytes]:
    match value:
        case str():
            return _STRING, _text(value)
        case float():
            return _F32, struct.pack("<f", value)
        case int():
            return _U32, struct.pack("<I", value)
        case _:
            number = _encode(value[0])[0]
            return _ARRAY, struct.pack("<I", number) + _u64(len(value)) + b"".join(_encode(item)[1] for item in value)


def damage_gguf(rng: random.Random, good: GgufFile) -> tuple[str, bytes]:
    """Change one part. Return what was changed, and the file."""
    file = copy.deepcopy(good)
    told = rng.choices(list(_DAMAGES), list(_DAMAGES.values()))[0](rng, file)
    return told, bytes(file)


def _change_value(rng: random.Random, file: GgufFile) -> str:
    """Another value, of the same type or of another one."""
    entry = rng.choice(file.entries)
    if entry.type_number == _STRING or rng.random() < 0.2:
        text = rng.choice(_TEXTS)
        entry.type_number, entry.content = _STRING, _text(text)
        return f"{entry.key} = {text[:30]!r}"
    number = rng.choice(_NUMBERS)
    type_number = entry.type_number if entry.type_number in _CODES and rng.random() < 0.7 else rng.choice(list(_CODES))
    entry.type_number, entry.content = type_number, _pack(type_number, number)
    return f"{entry.key} = {number} as type {type_number}"


def _pack(type_number: int, number: float) -> bytes:
    code = _CODES[type_number]
    if code in "fd":
        return struct.pack(f"<{code}", min(number, 3e38) if code == "f" and number == number else number)
    whole = int(number) if abs(number) < 1e30 else -1
    num_bytes = struct.calcsize(code)
    return (whole % (1 << 8 * num_bytes)).to_bytes(num_bytes, "little")


def _change_claim(rng: random.Random, file: GgufFile) -> str:
    """Another type, or another length of a string or an array, for the same bytes."""
    entry = rng.choice(file.entries)
    if rng.random() < 0.5:
        entry.type_number = rng.choice((*range(14), 255, (1 << 32) - 1))
        return f"{entry.key} has type {entry.type_number}, but not its value"
    size, place = rng.choice(_SIZES), 4 if entry.type_number == _ARRAY and rng.random() < 0.7 else 0
    entry.content = entry.content[:place] + _u64(size) + entry.content[place + 8 :]
    return f"{entry.key}: the 8 bytes at {place} of its value are {size}"


def _change_item(rng: random.Random, file: GgufFile) -> str:
    """Some bytes of an array."""
    entry = rng.choice([entry for entry in file.entries if entry.type_number == _ARRAY])
    place, size = rng.randrange(12, len(entry.content)), rng.choice((1, 2, 4, 8))
    entry.content = entry.content[:place] + rng.randbytes(size) + entry.content[place + size :]
    return f"{entry.key}: {size} bytes at {place} of its value are random"


def _change_keys(rng: random.Random, file: GgufFile) -> str:
    place = rng.randrange(len(file.entries))
    entry = file.entries[place]
    match rng.randrange(4):
        case 0:
            del file.entries[place]
            return f"{entry.key} is missing"
        case 1:
            file.entries.append(entry)
            return f"{entry.key} occurs twice"
        case 2:
            old, entry.key = entry.key, rng.choice((*_TEXTS, "general.alignment"))
            return f"{old} is called {entry.key[:30]!r}"
        case _:
            key = rng.choice(("general.alignment", "split.count", "llama.expert_count", "llama.rope.scaling.type"))
            number = rng.choice(_SIZES) % (1 << 32)
            file.add(key, number)
            return f"{key} = {number} is there too"


def _change_tensor(rng: random.Random, file: GgufFile) -> str:
    place = rng.randrange(len(file.tensors))
    info = file.tensors[place]
    match rng.randrange(7):
        case 0:
            axis = rng.randrange(len(info.dims))
            info.dims[axis] = rng.choice(_SIZES)
            return f"{info.name} has dimensions {info.dims}"
        case 1:
            info.offset = rng.choice((*_SIZES, rng.choice(file.tensors).offset, len(file.data)))
            return f"{info.name} has offset {info.offset}"
        case 2:
            info.type_number = rng.choice((*range(42), 255, (1 << 32) - 1))
            return f"{info.name} has type {info.type_number}"
        case 3:
            info.num_dims = rng.choice((0, 1, 3, 5, 255, (1 << 32) - 1))
            return f"{info.name} has {info.num_dims} dimensions"
        case 4:
            old, info.name = (
                info.name,
                rng.choice((*_TEXTS, *_NAMES, file.tensors[0].name)),
            )
            return f"{old} is called {info.name[:30]!r}"
        case 5:
            info.dims = [*info.dims, 1] if rng.random() < 0.5 else [*info.dims[:-1], *info.dims[-1:] * 2]
            return f"{info.name} has dimensions {info.dims}"
        case _:
            del file.tensors[place]
            return f"{info.name} is missing"


def _change_counts(rng: random.Random, file: GgufFile) -> str:
    match rng.randrange(3):
        case 0:
            file.counts = rng.choice(_SIZES), None
        case 1:
            file.counts = None, rng.choice(_SIZES)
        case _:
            file.version = rng.choice((0, 1, 2, 4, 3 << 24, (1 << 32) - 1))
    return f"version {file.version}, claimed numbers of tensors and keys {file.counts}"


def _change_data(rng: random.Random, file: GgufFile) -> str:
    """NaN and infinity in some type, or an early end."""
    if rng.random() < 0.3:
        file.data = file.data[: rng.randrange(len(file.data))]
        return f"the data end after {len(file.data)} bytes"
    place, content = rng.randrange(len(file.data)), rng.choice((b"\xff", b"\x00\x7c", b"\x80\x7f", b"\x7f")) * 64
    file.data = file.data[:place] + content[: len(file.data) - place] + file.data[place + len(content) :]
    return f"the data have {content[:2].hex()} at {place}"


_DAMAGES: dict[Callable[[random.Random, GgufFile], str], int] = {
    _change_value: 8,
    _change_claim: 4,
    _change_item: 2,
    _change_keys: 3,
    _change_tensor: 5,
    _change_counts: 1,
    _change_data: 2,
}
"""Damage → how often it is drawn."""
