"""general.sampling.* of a GGUF file → generation_config.json, with llama.cpp's defaults (common_params_sampling)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.backend.checkpoint.gguf.directory import sampling_defaults
from penstock.backend.errors import StartupError

DEFAULTS = {
    "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0,
    "xtc_probability": 0.0, "xtc_threshold": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        ({}, {}),
        ({"temp": 0.6000000238418579, "top_p": 1.0, "top_k": 20}, {"temperature": 0.6, "top_p": 1.0, "top_k": 20}),
        ({"temp": -1.0, "top_k": -1, "min_p": 0}, {"temperature": 0, "top_k": 0, "min_p": 0}),
        ({"top_p": 2.0, "penalty_repeat": 1.1}, {"top_p": 1.0, "repetition_penalty": 1.1}),
        ({"mirostat": 0, "xtc_probability": 0.5, "penalty_last_n": 64}, {"xtc_probability": 0.5}),
        ({"mirostat": 2, "sequence": "top_k;temperature"}, {"mirostat": "2", "sequence": "'top_k;temperature'"}),
    ],
)
def test_settings_of_the_file_stand_before_llama_cpps_defaults(keys: dict[str, Any], changes: dict[str, Any]) -> None:
    assert sampling_defaults({f"general.sampling.{key}": value for key, value in keys.items()}) == DEFAULTS | changes


@pytest.mark.parametrize("value", [math.nan, math.inf, "0.6", True, [0.6]])
def test_setting_that_is_no_number_is_refused_by_its_key(value: Any) -> None:
    with pytest.raises(StartupError, match=r"general\.sampling\.temp is .*; expected a finite number"):
        sampling_defaults({"general.sampling.temp": value})
