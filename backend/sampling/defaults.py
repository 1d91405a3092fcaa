"""Sampling settings for requests that name none: the operator's, in JSON, and those of a model's own files."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from penstock.backend.errors import StartupError
from penstock.shm.messages import Sampling

SAMPLING_SETTING = "default sampling"
"""Name of the setting that holds --default-sampling, among those that change a model's answers."""
_MAX_CHARACTERS = 512
_KEYS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "xtc_probability", "xtc_threshold", "top_n_sigma", "dynatemp_range", "dynatemp_exponent",
)  # fmt: skip


def sampling_struct(keys: tuple[str, ...], *, is_strict: bool) -> type[Struct]:
    """Return a Struct in which each key has the bounds of the wire format, or is null."""
    fields = [(field.name, field.type | None, None) for field in msgspec.structs.fields(Sampling) if field.name in keys]
    return msgspec.defstruct("SamplingSettings", fields, frozen=True, forbid_unknown_fields=is_strict)


_Settings = sampling_struct(_KEYS, is_strict=True)


def read_default_sampling(text: str) -> dict[str, Any]:
    """Return the settings that a JSON object names. Raises StartupError."""
    if len(text) > _MAX_CHARACTERS:
        raise StartupError(f"{len(text)} characters; at most {_MAX_CHARACTERS} are read")
    try:
        return given(msgspec.json.decode(text, type=_Settings))
    except (msgspec.DecodeError, RecursionError) as error:
        raise StartupError(f"{error}; write a JSON object with some of {', '.join(_KEYS)}") from None


def given(settings: Struct) -> dict[str, Any]:
    """Return the fields that are not null."""
    return {name: value for name, value in msgspec.structs.asdict(settings).items() if value is not None}
