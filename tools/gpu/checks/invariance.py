"""Checks that a row's bits do not depend on other rows: in kernels, library products, and `--deterministic` passes."""

from __future__ import annotations

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
from penstock.tools.gpu.cases.check import require_same_bits
from penstock.tools.gpu.checks.correctness import run_checks
from penstock.tools.gpu.devices import device_context, mirror_launcher
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.devices.steps import Steps
from penstock.tools.gpu.items import Item
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


def run(results: Results, item: Item) -> None:
    (kind,) = item.arguments
    if kind == "kernels":
        launcher = mirror_launcher.MirrorLauncher()
        run_checks(results, launcher, invariance_checks(launcher.shared_bytes_per_sm))
    elif kind == "passes":
        check_passes(results, device_context.open_device_context(), PassSizes())
    else:
        check_products(results, device_context.open_device_context(), weight_shapes(LLAMA_8B), torch.bfloat16)


@torch.inference_mode()
def check_products(
    results: Results, context: DeviceContext, shapes: dict[str, tuple[int, int, int]], dtype: torch.dtype
) -> None:
    """Check that a row keeps its bits in every place of a block and beside other rows, and record whether it has the
    bits that it has alone in products of any number of rows: where it always has, `whole_products` may be 1.

    shapes: see `weight_shapes`; only outputs and inputs are used.
    """
    forbid_split_sums()
    for name, (outputs, inputs, _) in shapes.items():
        weight = torch.randn(outputs, inputs, device=context.torch_device, dtype=dtype).mul_(inputs**-0.5)
        rows, linear = weight.new_empty(_WHOLE_ROWS[-1], inputs).normal_(), CudaLinear(weight, weight.t(), None)
        results.agree(f"invariance.blocks.{name}", partial(_check_blocks, rows[:BLOCK_ROWS], linear))
        out = rows.new_empty(len(rows), outputs)
        alone = torch.cat([multiply(rows[i : i + 1], linear, out[:1]).clone() for i in range(_ROWS_ALONE)])
        differing = [
            num_rows
            for num_rows in _WHOLE_ROWS
            if not torch.equal(multiply(rows[:num_rows], linear, out[:num_rows])[:_ROWS_ALONE], alone[:num_rows])
        ]
        detail = f"other bits with {', '.join(map(str, differing))} rows" if differing else "equal bits"
        results.fact(f"invariance.whole.{name}", len(differing), f"of {len(_WHOLE_ROWS)} numbers of rows", detail)


def _check_blocks(rows: torch.Tensor, linear: CudaLinear) -> tuple[str, None]:
    def product(x: torch.Tensor) -> torch.Tensor:
        return BlockedMatmul().multiply(x, linear, x.new_empty(len(x), linear.num_outputs))

    half, expected = BLOCK_ROWS // 2, product(rows)
    for shift in range(1, BLOCK_ROWS):
        require_same_bits(f"{shift} places further", product(rows.roll(shift, 0)), expected.roll(shift, 0))
    mixed = torch.cat([rows.flip(0), rows[:half], -rows[:half]])  # in the second of two blocks
    require_same_bits("beside others", product(mixed)[BLOCK_ROWS:][:half], expected[:half])
    return f"same bits in all {BLOCK_ROWS} places", None


@torch.inference_mode()
def check_passes(results: Results, context: DeviceContext, sizes: PassSizes) -> None:
    """Check passes of each KV dtype."""
    weights = RandomWeights(sizes.config, sizes.dtype, context.torch_device)
    for kv_dtype in sizes.kv_dtypes:
        name = f"invariance.deterministic.{kv_dtype}"
        results.attempt(name, partial(_check_pass, results, context, sizes, weights, kv_dtype, name))


def _check_pass(
    results: Results, context: DeviceContext, sizes: PassSizes, weights: RandomWeights, kv_dtype: str, name: str
) -> None:
    num_rows = max(batch_case.num_rows for batch_case in sizes.batch_cases)
    prompts = np.random.default_rng(0).integers(0, sizes.config.vocab_size, (num_rows, sizes.prompt_tokens))
    mine, *others = prompts.astype(np.int32)
    pages = -(-(sizes.prompt_tokens + sizes.new_tokens) // _PAGE_TOKENS)
    steps = StepSizes(num_rows, num_rows * sizes.prompt_tokens, pages * _PAGE_TOKENS, deterministic=True)
    made = CudaDecoderPass(sizes.config, weights, context.device, sizes.dtype, steps)
    made.create_cache(num_rows * pages, _PAGE_TOKENS, kv_dtype)
    try:
        expected = _logits(made, mine, others, ALONE, sizes.new_tokens, pages)
        found = {
            each.name: (_logits(made, mine, others, each, sizes.new_tokens, pages), expected)
            for each in sizes.batch_cases
        }
        # As after a preemption: the decoded tokens are prefilled in a chunk.
        whole = np.concatenate([mine, expected.argmax(axis=1)[:-1].astype(np.int32)])
        found["recomputed"] = _logits(made, whole, others, ALONE, 1, pages), expected[-1:]
    finally:
        made.close()
    for case, (logits, alone) in found.items():
        same = (logits.view(np.int32) == alone.view(np.int32)).all(axis=1)
        detail = f"{int(same.sum())} of {len(same)} tokens have the same logits as in a batch of one"
        results.check(f"{name}.{case}", bool(same.all()), detail)


def _logits(
    forward_pass: CudaDecoderPass, mine: Ids, others: list[Ids], batch_case: BatchCase, num_tokens: int, pages: int
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
