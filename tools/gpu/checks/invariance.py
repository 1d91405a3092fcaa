"""The section "invariance": a row's bits do not depend on the other rows in our kernels, in products in blocks, and in
whole passes with `--deterministic`.

The section end-to-end measures what independence costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.passes.cuda.ops.matmul import BLOCK_ROWS, BlockedMatmul, CudaLinear, forbid_split_sums, multiply
from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import StepSizes
from penstock.tools.gpu.cases.catalogue import invariance_checks
from penstock.tools.gpu.checks.correctness import run_checks
from penstock.tools.gpu.devices.device_context import DeviceContext, open_device_context
from penstock.tools.gpu.devices.mirror_launcher import MirrorLauncher
from penstock.tools.gpu.devices.steps import Steps
from penstock.tools.gpu.results import Results
from penstock.tools.random_weights import LLAMA_8B, QWEN3_06B, RandomWeights, weight_shapes

Ids = NDArray[np.int32]

_PAGE_TOKENS = 32
_WHOLE = 1 << 30
_WHOLE_ROWS = (1, 2, 4, 8, 16, 17, 32, 64, 65, 128, 256, 512, 2048)
_ROWS_ALONE = 16
"""Rows of a whole product that are compared with their products alone."""


@dataclass(frozen=True)
class BatchCase:
    """How the sequence under test is batched: it is row `row` of num_rows.

    A prefill step takes `chunk` tokens of its prompt and `others_chunk` tokens of every other prompt.
    """

    name: str
    num_rows: int = 1
    row: int = 0
    chunk: int = _WHOLE
    others_chunk: int = _WHOLE


ALONE = BatchCase("alone")
BATCH_CASES = (
    BatchCase("few", 17, 3),
    BatchCase("blocks", BLOCK_ROWS + 20, BLOCK_ROWS + 9),
    BatchCase("chunks", 5, 2, 7, 7),
    BatchCase("tokens", 5, 2, 1, 1),
    BatchCase("beside_decodes", 9, 8, 7, 1),
)


@dataclass(frozen=True)
class PassSizes:
    config: DecoderConfig = QWEN3_06B
    dtype: torch.dtype = torch.bfloat16
    kv_dtypes: tuple[str, ...] = ("bf16", "q8_0")
    batch_cases: tuple[BatchCase, ...] = BATCH_CASES
    prompt_tokens: int = 37
    new_tokens: int = 16


def run(results: Results) -> None:
    launcher = MirrorLauncher()
    run_checks(results, launcher, invariance_checks(launcher.shared_bytes_per_sm), reserve_s=0.5 * results.remaining_s)
    context = open_device_context()
    check_products(results, context, weight_shapes(LLAMA_8B), torch.bfloat16)
    check_passes(results, context, PassSizes())


@torch.inference_mode()
def check_products(
    results: Results, context: DeviceContext, shapes: dict[str, tuple[int, int, int]], dtype: torch.dtype
) -> None:
    """Check that a row keeps its bits in every place of a block and beside other rows, and record whether it keeps them
    in whole products too: where all do, `whole_products` may be 1.

    shapes: see `weight_shapes`; only outputs and inputs are used.
    """
    for name, (outputs, inputs, _) in shapes.items():
        work = partial(_check_product, results, context, name, outputs, inputs, dtype)
        results.attempt(f"invariance.blocks.{name}", work)
        whole = partial(_record_whole_products, results, context, name, outputs, inputs, dtype)
        results.attempt(f"invariance.whole.{name}", whole)


def _check_product(
    results: Results, context: DeviceContext, name: str, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    weight = torch.randn(outputs, inputs, device=context.torch_device, dtype=dtype).mul_(inputs**-0.5)
    linear, matmul = CudaLinear(weight, weight.t(), None), BlockedMatmul()

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return matmul.multiply(x, linear, torch.empty(len(x), outputs, device=context.torch_device, dtype=dtype))

    rows, others = (torch.randn(BLOCK_ROWS, inputs, device=context.torch_device, dtype=dtype) for _ in range(2))
    expected = multiply(rows)
    differing = [
        f"{shift} places further"
        for shift in range(1, BLOCK_ROWS)
        if not torch.equal(multiply(rows.roll(shift, 0)), expected.roll(shift, 0))
    ]
    # Half of the rows, beside other rows and in the second of two blocks.
    mixed = torch.cat([others, rows[: BLOCK_ROWS // 2], others[: BLOCK_ROWS // 2]])
    if not torch.equal(multiply(mixed)[BLOCK_ROWS : BLOCK_ROWS * 3 // 2], expected[: BLOCK_ROWS // 2]):
        differing.append("beside others")
    detail = f"different bits {', '.join(differing[:8])}" if differing else f"same bits in all {BLOCK_ROWS} places"
    results.check(f"invariance.blocks.{name}", not differing, detail)


def _record_whole_products(
    results: Results, context: DeviceContext, name: str, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    """In products of any number of rows, a row has the bits that it has alone."""
    weight = torch.randn(outputs, inputs, device=context.torch_device, dtype=dtype).mul_(inputs**-0.5)
    linear = CudaLinear(weight, weight.t(), None)
    rows = torch.randn(_WHOLE_ROWS[-1], inputs, device=context.torch_device, dtype=dtype)
    out = torch.empty(len(rows), outputs, device=context.torch_device, dtype=dtype)
    forbid_split_sums()
    alone = torch.cat([multiply(rows[i : i + 1], linear, out[:1]).clone() for i in range(_ROWS_ALONE)])
    differing = [
        num_rows
        for num_rows in _WHOLE_ROWS
        if not torch.equal(multiply(rows[:num_rows], linear, out[:num_rows])[:_ROWS_ALONE], alone[:num_rows])
    ]
    detail = f"other bits with {', '.join(map(str, differing))} rows" if differing else "equal bits"
    results.fact(f"invariance.whole.{name}", len(differing), f"of {len(_WHOLE_ROWS)} numbers of rows", detail)


@torch.inference_mode()
def check_passes(results: Results, context: DeviceContext, sizes: PassSizes, reserve_s: float = 0.0) -> None:
    """Check passes of each KV dtype. Skips those for which at most reserve_s seconds are left."""
    weights = RandomWeights(sizes.config, sizes.dtype, context.torch_device)
    for kv_dtype in sizes.kv_dtypes:
        name = f"invariance.deterministic.{kv_dtype}"
        results.attempt(name, partial(_check_pass, results, context, sizes, weights, kv_dtype, name), reserve_s)


def _check_pass(
    results: Results, context: DeviceContext, sizes: PassSizes, weights: RandomWeights, kv_dtype: str, name: str
) -> None:
    num_rows = max(batch_case.num_rows for batch_case in sizes.batch_cases)
    rng = np.random.default_rng(0)
    mine, *others = rng.integers(0, sizes.config.vocab_size, (num_rows, sizes.prompt_tokens)).astype(np.int32)
    pages = _pages(sizes.prompt_tokens + sizes.new_tokens)
    steps = StepSizes(num_rows, num_rows * sizes.prompt_tokens, pages * _PAGE_TOKENS, deterministic=True)
    forward_pass = CudaDecoderPass(sizes.config, weights, context.device, sizes.dtype, steps)
    forward_pass.create_cache(num_rows * pages, _PAGE_TOKENS, kv_dtype)
    try:
        expected = _logits(forward_pass, mine, others, ALONE, sizes.new_tokens, pages)
        found = {
            batch_case.name: _logits(forward_pass, mine, others, batch_case, sizes.new_tokens, pages)
            for batch_case in sizes.batch_cases
        }
        # As after a preemption: the decoded tokens are prefilled in a chunk.
        whole = np.concatenate([mine, expected.argmax(axis=1)[:-1].astype(np.int32)])
        last = _logits(forward_pass, whole, others, ALONE, 1, pages)
    finally:
        forward_pass.close()
    _record_same_logits(results, f"{name}.recomputed", last, expected[-1:])
    for batch_case_name, logits in found.items():
        _record_same_logits(results, f"{name}.{batch_case_name}", logits, expected)


def _record_same_logits(results: Results, name: str, found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    same = (found.view(np.int32) == expected.view(np.int32)).all(axis=1)
    results.check(
        name, bool(same.all()), f"{int(same.sum())} of {len(same)} tokens have the same logits as in a batch of one"
    )


def _logits(
    forward_pass: CudaDecoderPass, mine: Ids, others: Sequence[Ids], batch_case: BatchCase, num_tokens: int, pages: int
) -> NDArray[np.float32]:
    """[num_tokens, vocab] logits of the sequence's greedy tokens."""
    row = batch_case.row
    prompts = [*others[:row], mine, *others[row : batch_case.num_rows - 1]]
    chunks = [batch_case.others_chunk] * batch_case.num_rows
    chunks[row] = batch_case.chunk
    steps, found = Steps(batch_case.num_rows, pages), []
    num_steps = -(-len(mine) // batch_case.chunk)
    for step in range(num_steps + num_tokens - 1):
        if step < num_steps:
            parts = [prompt[step * n : (step + 1) * n] for prompt, n in zip(prompts, chunks, strict=True)]
            batch = steps.prefill(parts, samples=step == num_steps - 1)
        else:
            batch = steps.decode()
        logits = forward_pass.forward(batch)
        if len(batch.logit_rows):
            found.append(forward_pass.host_logits(logits[row : row + 1])[0])
        forward_pass.sample(logits, batch).wait()
    return np.stack(found)


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // _PAGE_TOKENS)
