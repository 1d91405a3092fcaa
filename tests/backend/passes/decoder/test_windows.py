"""The CPU's attention reads nothing from the pages that the engine gives back: see `PassSpec.window_tokens`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.cpu.forward_pass import CpuDecoderPass
from tests.backend.passes.decoder.driver import Driver, run_past_window
from tests.backend.passes.decoder.test_decoder_pass import checkpoint, make_pass, poison

if TYPE_CHECKING:
    from tests.backend.passes.decoder.conftest import MakeOps


@pytest.mark.parametrize("kv_dtype", ["fp32", "q8_0"])
def test_pages_behind_the_window_are_not_read(kv_dtype: str, make_ops: MakeOps) -> None:
    """The table names pages full of NaN in their place."""
    results = []
    for is_poisoned in (False, True):
        driver = Driver(make_pass("mistral/32", make_ops), num_pages=64, page_size=8, kv_dtype=kv_dtype)
        poison(driver.forward_pass)
        results.append(run_past_window(driver, is_poisoned=is_poisoned))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("architecture", "window_tokens"),
    [
        ("mistral", 16 + 63),
        ("phi3", 16 + 63),
        ("starcoder2", 16 + 63),
        ("mistral-full", None),
        ("gemma2", None),
        ("qwen2-window", None),
    ],
)
def test_window_is_declared_if_every_layer_has_one(architecture: str, window_tokens: int | None) -> None:
    assert CpuDecoderPass.describe(checkpoint(architecture), PassOptions()).window_tokens == window_tokens
    within = CpuDecoderPass.describe(checkpoint(architecture), PassOptions(max_context_tokens=70))
    assert within.window_tokens is None
