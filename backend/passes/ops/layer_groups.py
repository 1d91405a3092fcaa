"""Divides layers into groups that share pages of the KV cache: layers with the same window, in groups of equal size."""

from __future__ import annotations

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
_MAX_SPARE_PART = 12
"""At most a twelfth of the cache is lost because a window's layers do not fill their last group."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Groups of layers. A page has memory for num_layers layers."""

    windows: tuple[int | None, ...]
    """The groups' windows, as in `PassSpec.kv_windows`."""
    num_layers: int
    """Layers in each group; the last group of a window may have fewer."""
    places: tuple[tuple[int, int], ...]
    """By layer: its group, and its index in the group. Without meaning for layers without attention."""


def layer_groups(config: DecoderConfig, options: PassOptions) -> LayerGroups:
    """Return the groups of a pass that can split its layers."""
    return split_groups(config) if options.splits_layers else one_group(config)


def check_groups(batch: StepBatch, num_groups: int) -> None:
    """Raises ValueError for a page table with another number of groups: the kernels would read out of bounds."""
    found = 1 if batch.page_table.ndim == 2 else batch.page_table.shape[2]
    if found != num_groups:
        raise ValueError(f"a page table of {found} groups of layers; the pass has {num_groups}")


def one_group(config: DecoderConfig) -> LayerGroups:
    """Make one group: all layers share pages. They have a window if every layer has one."""
    windows, places = _windows(config), [(0, 0)] * config.num_layers
    for place, index in enumerate(windows):
        places[index] = 0, place
    window = None if None in windows.values() else max(window for window in windows.values() if window is not None)
    return LayerGroups((window,), len(windows), tuple(places))


def split_groups(config: DecoderConfig) -> LayerGroups:
    """Give layers with the same window their own pages. One group if their numbers leave no good division."""
    layers: defaultdict[int | None, list[int]] = defaultdict(list)
    windows_by_layer = _windows(config)
    for index, window in windows_by_layer.items():
        layers[window].append(index)
    for size in range(min(map(len, layers.values())), 0, -1):
        num_groups = sum(-(-len(own) // size) for own in layers.values())
        num_spare = num_groups * size - len(windows_by_layer)
        if num_groups <= _MAX_GROUPS and num_spare * _MAX_SPARE_PART <= len(windows_by_layer):
            break
    else:
        return one_group(config)
    windows: list[int | None] = []
    places = [(0, 0)] * config.num_layers
    for window, own in sorted(layers.items(), key=lambda item: (item[0] is not None, item[0])):
        for place, index in enumerate(own):
            places[index] = len(windows) + place // size, place % size
        windows += [window] * -(-len(own) // size)
    return LayerGroups(tuple(windows), size, tuple(places))


def _windows(config: DecoderConfig) -> dict[int, int | None]:
    """By layer with attention, how far back its kernels may read; None also for windows longer than any sequence."""
    with_pages = (index for index in range(config.num_layers) if config.delta_net_of_layer(index) is None)
    windows = {index: config.window_of_layer(index) for index in with_pages}
    reaches = {index: None if window is None else window + _BLOCK_TOKENS - 1 for index, window in windows.items()}
    return {
        index: None if reach is None or reach >= config.max_context_tokens else reach
        for index, reach in reaches.items()
    }
