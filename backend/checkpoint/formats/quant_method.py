"""The quantisation method that a config.json names. Imports no torch, because start-up reads it for every pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.backend.checkpoint.files.json_file import read_json_object

CONFIG_KEYS = ("quantization_config", "compression_config")
"""The second is the first name that compressed-tensors used."""
OWN_FILE = "hf_quant_config.json"
"""ModelOpt's file, beside a config.json that may not mention it."""


def with_own_file(config: Mapping[str, Any], model_dir: Path) -> Mapping[str, Any]:
    """The decoded config.json, with quantization_config from OWN_FILE if only that has it. Raises StartupError."""
    path = model_dir / OWN_FILE
    if quantization_settings(config) is not None or not path.is_file():
        return config
    return {**config, CONFIG_KEYS[0]: {**read_json_object(path), "quant_method": "modelopt"}}


def quantization_settings(config: Mapping[str, Any]) -> Any:
    """Return the value of the first of CONFIG_KEYS that the decoded config.json has, unchecked; None without one.

    MLX writes its settings into quantization, and again into the first of CONFIG_KEYS, without a quant_method.
    """
    settings = next((config[key] for key in CONFIG_KEYS if config.get(key) is not None), None)
    of_mlx = config.get("quantization")
    if isinstance(of_mlx, dict) and (not isinstance(settings, dict) or "quant_method" not in settings):
        return {**of_mlx, "quant_method": "mlx"}
    return settings


def declared_method(config: Mapping[str, Any]) -> str | None:
    """The decoded config.json's quant_method, such as "gptq"; None if the weights are plain."""
    settings = quantization_settings(config)
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return method if isinstance(method, str) else None
