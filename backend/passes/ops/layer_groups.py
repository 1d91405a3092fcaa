"""Divides layers into groups that share pages of the KV cache: layers with the same window, in groups of equal size.

Only layers with keys and values of their own count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.forward_pass import PassOptions, StepBatch

_BLOCK_TOKENS = 64
"""Attention kernels read keys and values in blocks of up to this many tokens, at multiples of this.

kBlock of kernels/step/engine.h, kTokens of the CUDA kernels for prompts.
"""
_MAX_GROUPS = 16
"""Most groups. For the same tokens, one thread finds a page of each."""
_MAX_SPARE_PART = 11
"""At most an eleventh of the cache is lost because a window's layers do not fill their last group."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Groups of layers. A page has memory for num_layers layers; if these have different sizes, for units, of which a
    layer has one or several."""

    windows: tuple[int | None, ...]
    """The groups' windows, as in `PassSpec.kv_windows`."""
    num_layers: int
    """Layers, or units, in each group; the last group of a window may have fewer."""
    places: tuple[tuple[int, int], ...]
    """By layer: its group, and its index, or that of its first unit, in the group."""


def layer_groups(config: DecoderConfig, options: PassOptions) -> LayerGroups:
    """Return the groups of a pass that can split its layers."""
    return split_groups(config) if options.splits_layers else one_group(config)


def check_groups(batch: StepBatch, num_groups: int) -> None:
    """Raises ValueError for a page table with another number of groups: the kernels would read out of bounds."""
    found = 1 if batch.page_table.ndim == 2 else batch.page_table.shape[2]
    if found != num_groups:
        raise ValueError(f"a page table of {found} groups of layers; the pass has {num_groups}")


def unit_values(config: DecoderConfig) -> int:
    """Numbers of a token's keys and values in a unit: those of a layer, if all have as many."""
    return math.gcd(*_sizes(config))


def one_group(config: DecoderConfig) -> LayerGroups:
    """Make one group: all layers share pages. They have a window if every layer has one."""
    windows, unit = _windows(config), unit_values(config)
    window = None if None in windows else max(window for window in windows if window is not None)
    places, num_units = [], 0
    for size in _sizes(config):
        places.append((0, num_units))
        num_units += size // unit
    return LayerGroups((window,), num_units, _with_shared(config, places))


def split_groups(config: DecoderConfig) -> LayerGroups:
    """Give layers with the same window their own pages. One group if their numbers leave no good division."""
    if config.delta_net is not None:
        return one_group(config)
    layers: defaultdict[tuple[int | None, int], list[int]] = defaultdict(list)
    unit = unit_values(config)
    for index, (window, values) in enumerate(zip(_windows(config), _sizes(config), strict=True)):
        layers[window, values // unit].append(index)
    num_units = sum(units * len(own) for (_, units), own in layers.items())
    # The kind with the fewest units decides, because it leaves most of a page that is too large.
    _, step, most = min((units * len(own), units, len(own)) for (_, units), own in layers.items())
    for size in (step * count for count in range(most, 0, -1)):
        if size < max(units for _, units in layers):
            continue
        num_groups = sum(-(-len(own) // (size // units)) for (_, units), own in layers.items())
        num_spare = num_groups * size - num_units
        if num_groups <= _MAX_GROUPS and num_spare * _MAX_SPARE_PART <= num_units:
            break
    else:
        return one_group(config)
    windows: list[int | None] = []
    places = [(0, 0)] * sum(map(len, layers.values()))
    for (window, units), own in sorted(layers.items(), key=lambda item: (item[0][0] is not None, item[0])):
        per_group = size // units
        for place, index in enumerate(own):
            places[index] = len(windows) + place // per_group, place % per_group * units
        windows += [window] * -(-len(own) // per_group)
    return LayerGroups(tuple(windows), size, _with_shared(config, places))


def _sizes(config: DecoderConfig) -> list[int]:
    """By layer with keys and values of its own, or with a delta rule, the numbers of a token."""
    layers = [index for index in config.all_layers if config.source_of_layer(index) == index]
    return [2 * math.prod(config.heads_of_layer(i)) if config.delta_net_of_layer(i) is None else 0 for i in layers]


def _with_shared(config: DecoderConfig, places: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Give the layers after those with places the places of the layers whose keys and values they use."""
    return tuple(places[config.source_of_layer(index)] for index in config.all_layers)


def _windows(config: DecoderConfig) -> list[int | None]:
    """By layer with keys and values of its own, how far back its kernels may read; None also for windows longer than
    any sequence."""
    windows = [config.window_of_layer(index) for index in range(config.num_layers - config.num_shared_layers)]
    reaches = [None if window is None else window + _BLOCK_TOKENS - 1 for window in windows]
    return [None if reach is None or reach >= config.max_context_tokens else reach for reach in reaches]
