"""Typed access to a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.errors import StartupError

T = TypeVar("T", int, float, str)

_NEUTRAL = {
    "expert_gating_func": 1,
    "expert_weights_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}
"""Keys with the value that says what any of these architectures does anyway. So does 0 of any key."""
_HARMLESS = frozenset({"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "classifier.output_labels"})
"""Keys that change nothing, whatever their value. A key that is neither read nor listed here is refused."""


class Metadata:
    """Typed access to metadata, which remembers the keys that were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()
        self.architecture = self.get("general.architecture", str) or ""
        self.prefix = f"{self.architecture}."

    def refuse_unread(self, *, is_causal: bool) -> None:
        """Raises StartupError for a key of the architecture that was not read and may change the computation."""
        neutral = _NEUTRAL | {"attention.causal": is_causal}
        for key, value in self._values.items():
            name = key.removeprefix(self.prefix)
            if name == key or key in self._read or name in _HARMLESS:
                continue
            is_off = value == 0 and not isinstance(value, bool)
            if not is_off and (name not in neutral or neutral[name] != value):
                raise StartupError(f"{key} is {shorten(value)}; this architecture is supported without it only")

    def get(self, key: str, kind: type[T]) -> T | None:
        """Raises StartupError for a value of another type."""
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise StartupError(f"{key} is {shorten(value)}; expected {kind.__name__}")
        return value

    def skip(self, keys: Iterable[str]) -> None:
        """Count keys of the architecture as read."""
        self._read.update(self.prefix + key for key in keys)

    def own(self, key: str, kind: type[T]) -> T | None:
        """Read a key of the architecture."""
        return self.get(self.prefix + key, kind)

    def required(self, key: str) -> int:
        value = self.own(key, int)
        if value is None:
            raise StartupError(f"{self.prefix}{key} is missing")
        return value

    def check_equal(self, key: str, expected: float | None, other: str) -> None:
        """Raises StartupError unless the number is absent or expected, the value of the key other."""
        value = self.own(key, float)
        if value is not None and value != expected:
            raise StartupError(f"{self.prefix}{key} is {value:g}; it must be that of {other}, {expected}")

    def same_in_all_layers(self, key: str) -> int | None:
        """Read a number, or a list of equal numbers for all layers."""
        self._read.add(self.prefix + key)
        value = self._values.get(self.prefix + key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise StartupError(f"{self.prefix}{key} is {shorten(value)}; expected the same integer for all layers")
        return value

    def strings(self, key: str) -> list[str]:
        """Read a list of strings; empty if there is none. Raises StartupError for another value."""
        self._read.add(self.prefix + key)
        value = self._values.get(self.prefix + key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise StartupError(f"{self.prefix}{key} is {shorten(value)}; expected a list of strings")
        return value

    def interval_or_flags(self, key: str) -> int | list[bool] | None:
        """Read a number, or a flag for each layer."""
        self._read.add(self.prefix + key)
        value = self._values.get(self.prefix + key)
        if isinstance(value, list) and all(item in (0, 1) for item in value):
            return [bool(item) for item in value]
        return self.own(key, int)

    def numbers(self, key: str, count: int) -> list[float]:
        """Read count numbers; infinite ones too."""
        self._read.add(self.prefix + key)
        values = self._values.get(self.prefix + key)
        if not isinstance(values, list) or len(values) != count or not all(isinstance(item, float) for item in values):
            raise StartupError(f"{self.prefix}{key} is {shorten(values)}; expected {count} numbers")
        return values

    def integers(self, key: str, count: int, *, default: int | None = None) -> list[int]:
        """Read a number, or flag, for each layer; one number is that of all."""
        self._read.add(self.prefix + key)
        value = self._values.get(self.prefix + key, default)
        values = [item for item in (value if isinstance(value, list) else [value] * count) if isinstance(item, int)]
        if len(values) != count:
            raise StartupError(f"{self.prefix}{key} is {shorten(value)}; expected {count} integers")
        return list(map(int, values))
