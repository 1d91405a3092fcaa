"""Measures with one setting of the libraries, which read it once per process: `MODE SECONDS`, prints JSON."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.backend.passes.decoder.cuda.forward_pass import CudaDecoderPass
from penstock.backend.passes.decoder.cuda.workspace_plan import StepSizes
from penstock.tools.gpu_check.devices.device_context import open_device_context
from penstock.tools.gpu_check.devices.models import RandomWeights
from penstock.tools.gpu_check.devices.steps import generate
from penstock.tools.gpu_check.model_configs import LLAMA_8B, QWEN3_06B, weight_shapes

if TYPE_CHECKING:
    from penstock.backend.checkpoint.decoder_config import DecoderConfig
    from penstock.tools.gpu_check.devices.device_context import DeviceContext

_PAGE_TOKENS = 32


@dataclass(frozen=True)
class LibrarySizes:
    shapes: dict[str, tuple[int, int, int]]
    compared_rows: tuple[int, ...] = (2, 7, 8, 16, 17, 33, 64, 128, 256, 512, 2048)
    timed_rows: tuple[int, ...] = (1, 64, 256)
    cold_bytes: int = 192 << 20
    config: DecoderConfig = QWEN3_06B
    dtype: torch.dtype = torch.bfloat16
    prompt_tokens: int = 37
    new_tokens: int = 64
    batches: tuple[int, ...] = (1, 17, 64)


def main(argv: list[str]) -> int:
    mode, until_s = argv[0], time.monotonic() + float(argv[1]) - 5.0
    context = open_device_context()
    if mode == "invariant":
        forbid_splits()
    measure(context, LibrarySizes(weight_shapes(LLAMA_8B)), until_s)
    return 0


def forbid_splits() -> None:
    """Forbid split sums in torch's products. Call it after `CudaDevice` is made, which sets one of these options."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul: Any = torch.backends.cuda.matmul
    try:
        # No sums in 16 bits and no split sums; needs torch 2.10.
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
    except (TypeError, RuntimeError):
        matmul.allow_bf16_reduced_precision_reduction = False


@torch.inference_mode()
def measure(context: DeviceContext, sizes: LibrarySizes, until_s: float) -> None:
    """Print all results so far after each part, so that the parent keeps them if it kills this process."""
    measured: dict[str, Any] = {"differing": {}, "step_us": dict.fromkeys(map(str, sizes.timed_rows), 0.0)}
    try:
        for name, (outputs, inputs, count) in sizes.shapes.items():
            measured["differing"][name] = _differing(context, sizes, outputs, inputs)
            for rows, us in _timed(context, sizes, outputs, inputs).items():
                measured["step_us"][rows] += count * us
        print(json.dumps(measured), flush=True)
        if time.monotonic() < until_s:
            measured["tokens"] = _compare_tokens(context, sizes)
    except Exception as error:  # noqa: BLE001 - the parent records it
        measured["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
    print(json.dumps(measured), flush=True)


def _differing(context: DeviceContext, sizes: LibrarySizes, outputs: int, inputs: int) -> list[int]:
    """The batch sizes at which some row's bits differ from those it has alone."""
    weight = torch.randn(outputs, inputs, device=context.torch_device, dtype=sizes.dtype).mul_(inputs**-0.5)
    x = torch.randn(max(sizes.compared_rows), inputs, device=context.torch_device, dtype=sizes.dtype)
    compared = sorted({0, *(rows - 1 for rows in sizes.compared_rows)})
    alone = {row: torch.mm(x[row : row + 1], weight.t())[0] for row in compared}
    differing = []
    for rows in sizes.compared_rows:
        together = torch.mm(x[:rows], weight.t())
        if not all(torch.equal(together[row], alone[row]) for row in compared if row < rows):
            differing.append(rows)
    return differing


def _timed(context: DeviceContext, sizes: LibrarySizes, outputs: int, inputs: int) -> dict[str, float]:
    count = max(1, sizes.cold_bytes // (2 * outputs * inputs))
    weights = [torch.randn(outputs, inputs, device=context.torch_device, dtype=sizes.dtype) for _ in range(count)]
    timed = {}
    for rows in sizes.timed_rows:
        x = torch.randn(rows, inputs, device=context.torch_device, dtype=sizes.dtype)
        y = torch.empty(rows, outputs, device=context.torch_device, dtype=sizes.dtype)
        timed[str(rows)] = context.clock.work_us([partial(torch.mm, x, weight.t(), out=y) for weight in weights])
    return timed


def _compare_tokens(context: DeviceContext, sizes: LibrarySizes) -> dict[str, Any]:
    """Compare the greedy tokens of the same prompts in batches of several sizes."""
    rng = np.random.default_rng(0)
    most = max(sizes.batches)
    pages = -(-(sizes.prompt_tokens + sizes.new_tokens) // _PAGE_TOKENS)
    prompts = [rng.integers(0, sizes.config.vocab_size, sizes.prompt_tokens).astype(np.int32) for _ in range(most)]
    weights = RandomWeights(sizes.config, sizes.dtype, context.torch_device)
    steps = StepSizes(most, most * sizes.prompt_tokens, pages * _PAGE_TOKENS)
    forward_pass = CudaDecoderPass(sizes.config, weights, context.device, sizes.dtype, steps)
    forward_pass.create_cache(most * pages, _PAGE_TOKENS, "bf16")
    tokens = {size: generate(forward_pass, prompts[:size], sizes.new_tokens, pages) for size in sizes.batches}
    forward_pass.close()
    parts = []
    for size in sizes.batches[:-1]:
        same = (tokens[size] == tokens[most][:size]).all(axis=1)
        parts.append(f"{int(same.sum())} of {size} rows agree in batches of {size} and {most}")
    return {"detail": "; ".join(parts)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
