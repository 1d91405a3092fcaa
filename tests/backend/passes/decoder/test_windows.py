"""The CPU's attention reads nothing from the pages that the engine gives back: see `PassSpec.kv_windows`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.forward_pass import PassOptions
from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.passes.ops.layer_groups import split_groups, unit_values
from tests.backend.harness import Bench
from tests.backend.passes.conftest import MakeOps, make_native_ops, make_torch_ops
from tests.backend.passes.decoder.driver import Driver, run_past_window
from tests.backend.passes.decoder.test_decoder_pass import checkpoint, make_pass, oracle_logits, poison, prompts


@pytest.mark.parametrize(
    ("architecture", "kv_dtype"),
    [("mistral/32", "fp32"), ("mistral/32", "q8_0"), ("gemma2", "fp32"), ("gemma3", "q8_0")],
)
def test_pages_behind_the_window_are_not_read(architecture: str, kv_dtype: str, make_ops: MakeOps) -> None:
    """The table names pages full of NaN in their place."""
    results = []
    for is_poisoned in (False, True):
        driver = Driver(make_pass(architecture, make_ops), num_pages=64, page_size=8, kv_dtype=kv_dtype)
        poison(driver.forward_pass)
        results.append(run_past_window(driver, is_poisoned=is_poisoned))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("architecture", "num_groups", "make"),
    [
        ("gemma3", 7, make_native_ops),
        ("gemma3n", 4, make_native_ops),
        ("gemma4-e", 2, make_native_ops),
        ("gemma4-e", 2, make_torch_ops),
    ],
)
def test_requests_in_few_pages_have_the_tokens_of_transformers(
    architecture: str, num_groups: int, make: MakeOps
) -> None:
    """Runs in the engine: groups of layers, of which one keeps its pages, and requests that preempt each other."""
    decoder = make_pass(architecture, make)
    num_pages = KvGroups.of(16, decoder.spec.kv_windows, 32, 1).most_pages(230)
    bench = Bench(
        forward_pass=decoder, vocab_size=256, num_pages=num_pages, page_size=16, max_batch_tokens=32, max_context=230
    )
    batch = prompts((20, 30, 28, 150))
    for request_id, prompt in enumerate(batch):
        bench.submit(list(prompt), 60, request_id=request_id)
    bench.run_dry()
    assert num_pages < num_groups * 230 // 16
    for request_id, prompt in enumerate(batch):
        tokens = bench.received(request_id).token_ids
        choices = oracle_logits(architecture, (*prompt, *tokens[:-1])).argmax(axis=1)[len(prompt) - 1 :]
        assert tokens == choices.tolist()
        assert len(tokens) == 60
    assert bench.scheduler.num_preemptions > 0
    decoder.close()


FULL, WINDOW = None, 16 + 63


@pytest.mark.parametrize(
    ("architecture", "kv_windows", "num_layers"),
    [
        ("mistral", (WINDOW,), 3),
        ("phi3", (WINDOW,), 3),
        ("starcoder2", (WINDOW,), 3),
        ("mistral-full", (FULL,), 3),
        ("gemma2", (FULL, WINDOW, WINDOW), 1),
        ("gemma3", (FULL, *6 * [WINDOW]), 1),
        ("cohere2", (FULL, *3 * [WINDOW]), 1),
        ("qwen2-window", (FULL, WINDOW, WINDOW), 1),
    ],
)
def test_layers_with_the_same_window_share_pages(
    architecture: str, kv_windows: tuple[int | None, ...], num_layers: int
) -> None:
    config = read_decoder_config(checkpoint(architecture))
    groups = split_groups(config)
    assert (groups.windows, groups.num_layers) == (kv_windows, num_layers)
    assert CpuDecoderPass.describe(checkpoint(architecture), PassOptions(splits_layers=True)).kv_windows == kv_windows
    assert len(set(groups.places)) == config.num_layers
    for index, (group, place) in enumerate(groups.places):
        window = config.window_of_layer(index)
        assert groups.windows[group] == (None if window is None else window + 63)
        assert place < num_layers
    within = CpuDecoderPass.describe(checkpoint(architecture), PassOptions(max_context_tokens=70, splits_layers=True))
    assert within.kv_windows == (None,)


@pytest.mark.parametrize(
    ("num_layers", "num_full", "num_groups", "group_layers"),
    [(62, 10, 11, 6), (48, 8, 6, 8), (34, 5, 7, 5), (26, 4, 7, 4), (24, 12, 2, 12), (64, 28, 11, 6), (61, 1, 1, 61)],
)
def test_groups_are_few_and_leave_little_of_the_cache_unused(
    num_layers: int, num_full: int, num_groups: int, group_layers: int
) -> None:
    """Among them the numbers of Gemma 3 27B, 12B, 4B and 1B, and gpt-oss 20B."""
    windows = tuple(None if index < num_full else 16 for index in range(num_layers))
    layers: dict[str, Any] = {"num_layers": num_layers, "layer_window_tokens": windows}
    groups = split_groups(replace(read_decoder_config(checkpoint("mistral")), **layers))
    assert (len(groups.windows), groups.num_layers) == (num_groups, group_layers)
    assert num_layers <= num_groups * group_layers <= num_layers * 13 / 12


@pytest.mark.parametrize(
    ("num_layers", "interval", "num_shared", "window_heads", "full_heads", "num_groups", "units"),
    [
        (35, 5, 20, (1, 256), (1, 512), 3, 15 + 3),
        (42, 6, 18, (2, 256), (2, 512), 7, 24 + 4),
        (60, 6, 0, (16, 256), (4, 512), 11, 2 * 50 + 10),
        (30, 6, 0, (8, 256), (2, 512), 15, 2 * 25 + 5 + 5),
    ],
    ids=["E2B", "E4B", "31B", "26B-A4B"],
)
def test_heads_of_two_sizes_share_pages(
    num_layers: int, interval: int, num_shared: int, window_heads: Any, full_heads: Any, num_groups: int, units: int
) -> None:
    """With the numbers of each Gemma 4. A unit is the smaller kind of layer; in the last model some are spare."""
    config = replace(
        read_decoder_config(checkpoint("gemma4")),
        num_layers=num_layers,
        layer_window_tokens=tuple(16 if (index + 1) % interval else None for index in range(num_layers)),
        num_kv_heads=window_heads[0],
        head_dim=window_heads[1],
        full_heads=full_heads,
        num_shared_layers=num_shared,
    )
    groups, used = split_groups(config), set()
    assert (len(groups.windows), len(groups.windows) * groups.num_layers) == (num_groups, units)
    for index, (group, first) in enumerate(groups.places):
        assert (groups.windows[group] is None) == (config.window_of_layer(index) is None)
        if config.source_of_layer(index) != index:
            assert groups.places[index] == groups.places[config.source_of_layer(index)]
            continue
        heads, head_dim = config.heads_of_layer(index)
        own = {(group, first + unit) for unit in range(2 * heads * head_dim // unit_values(config))}
        assert used.isdisjoint(own)
        assert max(unit for _, unit in own) < groups.num_layers
        used |= own
