"""Finds the linears of a model that a list of names in quantization_config refers to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.files.layout import TEXT_PREFIXES
from penstock.backend.errors import StartupError

_LINEAR = "Linear"
"""A target that means every linear of the model, including lm_head."""
_PATTERN = "re:"


def is_excluded(module: str, names: Iterable[str]) -> bool:
    """Whether one of the names means the module, or a part of the model that contains it.

    A name is consecutive components of the module's name ("mlp.gate" means "model.layers.0.mlp.gate", not
    …mlp.gate_proj), or a regular expression for its first ones. Raises StartupError for an invalid expression.
    """
    spellings = spellings_of(module)
    return any(
        f".{name}." in f".{spelling}." or _compile(rf"(?:{name})(?:\.|$)").match(spelling) is not None
        for name in names
        for spelling in spellings
    )


def is_target(module: str, names: Iterable[str]) -> bool:
    """Whether one of compressed-tensors' targets means the linear.

    A target is "Linear", the linear's name, or "re:" and an expression for the beginning of its name. Raises
    StartupError for an invalid expression.
    """
    spellings = spellings_of(module)
    return any(
        any(_compile(name.removeprefix(_PATTERN)).match(spelling) is not None for spelling in spellings)
        if name.startswith(_PATTERN)
        else name == _LINEAR or name in spellings
        for name in names
    )


def spellings_of(module: str) -> tuple[str, ...]:
    """The module's name, and its names as a part of a model that also reads images."""
    path = f"{module}."
    return (
        module,
        *(
            f"{prefix}{path.removeprefix(text)}".removesuffix(".")
            for prefix, text in TEXT_PREFIXES.items()
            if path.startswith(text)
        ),
    )


@lru_cache(maxsize=4096)
def _compile(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise StartupError(f"quantization_config: the expression {shorten(expression)} is invalid: {error}") from None
