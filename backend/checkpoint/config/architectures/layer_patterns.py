"""Rules for which layers of a model have a sliding window and which have rotary embeddings.

A function is the rule of one or more architectures; it reads config.json and returns an entry per layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from msgspec import UNSET

from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.checkpoint.config.architectures.hf_config import HfConfig

Windows: TypeAlias = tuple[int | None, ...]
"""Tokens of each layer's window; None for full attention."""

DEFAULT_WINDOW = 4096


def no_windows(config: HfConfig) -> Windows:
    return (None,) * config.num_hidden_layers


def window_everywhere(config: HfConfig) -> Windows:
    return (_window(config, DEFAULT_WINDOW),) * config.num_hidden_layers


def window_nowhere_unless_given(config: HfConfig) -> Windows:
    return (config.sliding_window or None,) * config.num_hidden_layers


def window_everywhere_if_used(config: HfConfig) -> Windows:
    return (_window(config, DEFAULT_WINDOW) if config.use_sliding_window else None,) * config.num_hidden_layers


def windows_of_even_first_layers(config: HfConfig) -> Windows:
    slides = tuple(i % 2 == 0 and i < config.max_window_layers for i in range(config.num_hidden_layers))
    return _by_layer_types(config, _window(config, DEFAULT_WINDOW) if config.use_sliding_window else None, slides)


def windows_unless_other_types(config: HfConfig) -> Windows:
    window = _window(config, DEFAULT_WINDOW)
    return _by_layer_types(config, window, (window is not None,) * config.num_hidden_layers)


def windows_of_last_layers(config: HfConfig) -> Windows:
    slides = tuple(i >= config.max_window_layers for i in range(config.num_hidden_layers))
    return _by_layer_types(config, _window(config, DEFAULT_WINDOW) if config.use_sliding_window else None, slides)


def windows_of_nope_layers(config: HfConfig) -> Windows:
    slides = tuple(not uses_rope for uses_rope in rope_at_intervals(config))
    return _by_layer_types(config, _window(config, None) if config.use_sliding_window else None, slides)


def windows_between(default_interval: int, default_window: int = DEFAULT_WINDOW) -> Callable[[HfConfig], Windows]:
    """Every sliding_window_pattern-th layer has full attention, the layers between have a window."""

    def windows(config: HfConfig) -> Windows:
        interval = config.sliding_window_pattern or default_interval
        slides = tuple((i + 1) % interval != 0 for i in range(config.num_hidden_layers))
        window = _window(config, default_window)
        if window is None:
            raise StartupError("sliding_window is null; this architecture needs a number")
        return _by_layer_types(config, window, slides)

    return windows


def last_layer_whole(rule: Callable[[HfConfig], Windows]) -> Callable[[HfConfig], Windows]:
    """The last layer has full attention, whatever the rule says."""
    return lambda config: (*rule(config)[:-1], None)


def rope_everywhere(config: HfConfig, windows: Windows = ()) -> tuple[bool, ...]:  # noqa: ARG001 - as all rules
    return (True,) * config.num_hidden_layers


def rope_at_intervals(config: HfConfig, windows: Windows = ()) -> tuple[bool, ...]:  # noqa: ARG001 - as all rules
    layers = config.num_hidden_layers
    if config.no_rope_layers is None:
        return tuple((i + 1) % config.no_rope_layer_interval != 0 for i in range(layers))
    if len(config.no_rope_layers) < layers:
        raise StartupError(f"no_rope_layers has {len(config.no_rope_layers)} entries for {layers} layers")
    return tuple(bool(flag) for flag in config.no_rope_layers[:layers])


def rope_within_windows(config: HfConfig, windows: Windows) -> tuple[bool, ...]:  # noqa: ARG001 - as all rules
    return tuple(window is not None for window in windows)


def _window(config: HfConfig, default: int | None) -> int | None:
    return default if config.sliding_window is UNSET else config.sliding_window


def _by_layer_types(config: HfConfig, window: int | None, default_slides: tuple[bool, ...]) -> Windows:
    """The windows by layer_types, or by default_slides if there are none."""
    if config.layer_types is None:
        return tuple(window if slides else None for slides in default_slides)
    if len(config.layer_types) != config.num_hidden_layers:
        raise StartupError(f"layer_types has {len(config.layer_types)} entries for {config.num_hidden_layers} layers")
    if window is None and "sliding_attention" in config.layer_types:
        raise StartupError(
            "layer_types has sliding_attention, but sliding_window or use_sliding_window gives no window"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
