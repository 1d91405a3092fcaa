"""Checks whether a row's bits depend on the other rows: in our kernels, products in blocks, and whole passes.

The sections end-to-end and unsplit measure what independence costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.tools.gpu.cases.catalogue import invariance_checks
from penstock.tools.gpu.checks.correctness import run_checks
from penstock.tools.gpu.checks.deterministic_passes import PassSizes, check_passes, check_products
from penstock.tools.gpu.devices.device_context import open_device_context
from penstock.tools.gpu.devices.mirror_launcher import MirrorLauncher
from penstock.tools.random_weights import LLAMA_8B, weight_shapes

if TYPE_CHECKING:
    from penstock.tools.gpu.results import Results


def run(results: Results) -> None:
    launcher = MirrorLauncher()
    run_checks(results, launcher, invariance_checks(launcher.shared_bytes_per_sm), reserve_s=0.5 * results.remaining_s)
    context = open_device_context()
    check_products(results, context, weight_shapes(LLAMA_8B), torch.bfloat16)
    check_passes(results, context, PassSizes())
