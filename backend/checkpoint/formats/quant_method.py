"""The quantisation method that a config.json names. Imports no torch, because start-up reads it for every pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_KEYS = ("quantization_config", "compression_config")
"""The second is the first name that compressed-tensors used."""


def quantization_settings(config: Mapping[str, Any]) -> Any:
    """Return the value of the first of CONFIG_KEYS that the decoded config.json has, unchecked; None without one."""
    return next((config[key] for key in CONFIG_KEYS if config.get(key) is not None), None)


def declared_method(config: Mapping[str, Any]) -> str | None:
    """The decoded config.json's quant_method, such as "gptq"; None if the weights are plain."""
    settings = quantization_settings(config)
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return method if isinstance(method, str) else None
