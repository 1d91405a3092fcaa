"""The sampling settings of a GGUF file: its own, and llama.cpp's defaults for the others."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIX = "general.sampling."


class _Setting(NamedTuple):
    name: str
    """In generation_config.json."""
    default: float
    """llama.cpp's; the models' authors and users of GGUF files tried them with it."""
    highest: float = math.inf
    """llama.cpp takes values beyond 0 and this one as these."""


_SETTINGS = {
    "temp": _Setting("temperature", 0.8),
    "top_k": _Setting("top_k", 40),
    "top_p": _Setting("top_p", 0.95, highest=1.0),
    "min_p": _Setting("min_p", 0.05, highest=1.0),
    "penalty_repeat": _Setting("repetition_penalty", 1.0),
}
_NOT_APPLIED = {"sequence": None, "mirostat": 0, "xtc_probability": 0}
"""Keys that are not supported, each with the value that changes nothing."""


def sampling_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of generation_config.json, and the settings that are not applied, as texts. Raises StartupError."""
    others = {
        key: shorten(value)
        for key, neutral in _NOT_APPLIED.items()
        if (value := metadata.get(_PREFIX + key)) not in (None, neutral)
    }
    return {setting.name: _read(metadata, key, setting) for key, setting in _SETTINGS.items()} | others


def _read(metadata: Mapping[str, Any], key: str, setting: _Setting) -> float:
    value = metadata.get(_PREFIX + key, setting.default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise StartupError(f"{_PREFIX}{key} is {shorten(value)}; expected a finite number")
    bounded = min(max(value, 0), setting.highest)
    return round(bounded) if isinstance(setting.default, int) else float(f"{bounded:.6g}")  # a float32 in the file
