"""Reads adapter_config.json. A key that changes more than the products of linears is refused by name."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from penstock.backend.checkpoint.files.json_file import convert, read_json_object, shorten
from penstock.backend.errors import StartupError

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 512
"""Largest rank. A larger adapter is faster when it is merged into the weights."""
_INITS_THAT_CHANGE_THE_MODEL = ("pissa", "olora", "corda", "loftq")
_KNOWN_SWITCHES = ("use_rslora",)
_REFUSED = {
    "use_dora": "DoRA scales the columns of the weights",
    "modules_to_save": "whole modules are trained",
    "trainable_token_indices": "embeddings are trained",
    "target_parameters": "parameters that are no linears, such as experts, are trained",
    "layer_replication": "layers are repeated",
    "alora_invocation_tokens": "it begins in the middle of a sequence",
    "lora_bias": "biases are trained",
    "fan_in_fan_out": "the matrices are transposed",
}
"""Key → its meaning, for keys that are refused when they are set."""

T = TypeVar("T")
_Rank = Annotated[int, Meta(ge=1, le=MAX_RANK)]
_Alpha = Annotated[float, Meta(ge=0.0, le=1e6)]
_Pattern = Annotated[str, Meta(min_length=1, max_length=200)]
_MAX_PATTERNS = 1024
_ITEM = r"(?:[^\\()\[\]{}*+?|^$]|\\[dw.\-]|\[\^?[^\\\[\]]+\])"
_TOKEN = re.compile(rf"{_ITEM}(?P<repeat>[*+?]|{{\d+(?:,\d*)?}})?|[|^$]|(?P<group>\((?:\?:)?)|\)(?![*+?{{])")
_MAX_CHOICES, _MAX_ALL_CHOICES = 4, 32
"""Groups and repetitions in a pattern, and in all of a file: matching takes time to the power of the first number."""


class PeftConfig(Struct, frozen=True):
    """The keys that say how an adapter is applied; `read_peft_config` has checked the others."""

    peft_type: str
    r: _Rank
    lora_alpha: _Alpha
    base_model_name_or_path: str | None = None
    bias: str = "none"
    use_rslora: bool = False
    rank_pattern: Annotated[dict[_Pattern, _Rank], Meta(max_length=_MAX_PATTERNS)] = {}
    alpha_pattern: Annotated[dict[_Pattern, _Alpha], Meta(max_length=_MAX_PATTERNS)] = {}

    def rank_of(self, module: str) -> int:
        """The rank that the matrices of a module, such as model.layers.0.self_attn.q_proj, must have."""
        return _of_pattern(self.rank_pattern, module, self.r)

    def scale_of(self, module: str) -> float:
        """The factor of the product of a module's two matrices."""
        rank, alpha = self.rank_of(module), _of_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_peft_config(directory: Path) -> PeftConfig:
    """Raises StartupError naming the key, its value and what is supported."""
    path = directory / CONFIG_FILE
    values = read_json_object(path)
    config = convert(values, PeftConfig, path)
    if config.peft_type != "LORA":
        raise StartupError(f'{path}: peft_type is {shorten(config.peft_type)}; only "LORA" is supported')
    if config.bias != "none":
        raise StartupError(f'{path}: bias is {shorten(config.bias)}; only "none" is supported')
    for key, value in values.items():
        if value and (key in _REFUSED or (key.startswith("use_") and key not in _KNOWN_SWITCHES)):
            meaning = _REFUSED.get(key, "it changes how the matrices are applied")
            raise StartupError(f"{path}: {key} is {shorten(value)}; this is not supported: {meaning}")
    _check_init(values.get("init_lora_weights"), path)
    _check_patterns((*config.rank_pattern, *config.alpha_pattern), path)
    return config


def _check_patterns(patterns: tuple[str, ...], path: Path) -> None:
    """Allow what cannot take long: no group is repeated, and few choices multiply."""
    num_all = 0
    for pattern in patterns:
        at = num_choices = 0
        while (token := _TOKEN.match(pattern, at)) is not None:
            at = token.end()
            num_choices += token["repeat"] is not None or token["group"] is not None
        num_all += num_choices
        if at < len(pattern):
            raise StartupError(
                f"{path}: the pattern {shorten(pattern)} has {shorten(pattern[at:])}; patterns may have plain "
                r"characters, . \d \w \. \- [...] | ^ $, groups, and * + ? {n} after a single character"
            )
        if num_choices > _MAX_CHOICES or num_all > _MAX_ALL_CHOICES:
            raise StartupError(
                f"{path}: the pattern {shorten(pattern)} has {num_choices} groups and repetitions, all up to it "
                f"{num_all}; the limits are {_MAX_CHOICES} and {_MAX_ALL_CHOICES}"
            )
        try:
            re.compile(pattern)
        except (re.error, OverflowError) as error:
            raise StartupError(f"{path}: the pattern {shorten(pattern)} is no regular expression: {error}") from None


def _check_init(init: Any, path: Path) -> None:
    if isinstance(init, str) and init.lower().startswith(_INITS_THAT_CHANGE_THE_MODEL):
        raise StartupError(
            f"{path}: init_lora_weights is {shorten(init)}; the adapter is right only with the base model that this "
            "initialisation has changed: convert it to a plain one (path_initial_model_for_weight_conversion of peft)"
        )


@functools.lru_cache(maxsize=2 * _MAX_PATTERNS)
def _compiled(pattern: str) -> re.Pattern[str]:
    """It matches the end of a module's name, as in peft."""
    return re.compile(rf"(.*\.)?({pattern})$")


def _of_pattern(patterns: dict[str, T], module: str, default: T) -> T:
    """The value of the first pattern that matches."""
    return next((value for key, value in patterns.items() if _compiled(key).match(module)), default)
