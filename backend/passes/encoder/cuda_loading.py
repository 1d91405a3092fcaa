"""Plans an encoder's memory on a GPU before anything is loaded, and loads it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from penstock.backend.checkpoint.encoders.encoder_config import EncoderConfig
from penstock.backend.checkpoint.encoders.tensors import WeightSource
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions, PassSpec
from penstock.backend.passes.cuda.attention.encoder_attention import unsupported_head
from penstock.backend.passes.cuda.attention.prefill_attention import MAX_TILES
from penstock.backend.passes.cuda.device.device import Device, first_line
from penstock.backend.passes.cuda.device.launcher import KernelFailed
from penstock.backend.passes.cuda.ops.matmul import BlockedMatmul
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import LIBRARY_BYTES
from penstock.backend.passes.encoder.cuda_ops import BLOCK_ROWS, CudaEncoderOps
from penstock.backend.passes.encoder.model import EncoderModel
from penstock.backend.passes.encoder.ops import EncoderRows
from penstock.backend.passes.encoder.spec import make_spec

_UNIT = 8
"""Widths must be multiples of it: kernels read 16 bytes at a time."""


def plan_spec(config: EncoderConfig, options: PassOptions) -> PassSpec:
    """The spec with its memory. Raises StartupError for a model or an option that a GPU does not support."""
    dtype = choose_cuda_dtype(options)
    reason = unsupported_on_gpu(config)
    if reason is not None:
        raise StartupError(f"the GPU kernels do not support this encoder: {reason}; use --gpu none")
    if options.max_running > MAX_TILES // 2 or options.max_batch_tokens > 64 * MAX_TILES // 2:
        raise StartupError(
            f"a step of {options.max_running} inputs and {options.max_batch_tokens} tokens is too large for the GPU "
            "kernels: lower --max-batch-tokens or --max-running"
        )
    spec = make_spec(config, dtype, options.quantize)
    return replace(spec, workspace_bytes=_workspace_bytes(config, dtype, options.max_batch_tokens), runs_ahead=True)


def choose_cuda_dtype(options: PassOptions) -> torch.dtype:
    """ "auto" is bf16. Raises StartupError."""
    match options.dtype:
        case "bf16" | "auto":
            return torch.bfloat16
        case "fp32" if options.quantize != "none":
            raise StartupError(f"--quantize is {options.quantize}; on a GPU it needs --dtype bf16, not fp32")
        case "fp32":
            return torch.float32
    raise StartupError(f"dtype is {options.dtype!r}; it must be auto, bf16 or fp32")


def unsupported_on_gpu(config: EncoderConfig) -> str | None:
    """Return why the kernels cannot run this model, or None."""
    if (reason := unsupported_head(config.head_dim)) is not None:
        return reason
    if config.relative_span:
        return "there are no kernels for scores by relative position"
    if config.intermediate_size % _UNIT:
        return f"intermediate_size is {config.intermediate_size}; it must be a multiple of {_UNIT}"
    return None


def load(
    config: EncoderConfig, weights: WeightSource, options: PassOptions, device: Device
) -> tuple[CudaEncoderOps, EncoderModel]:
    """Load the weights, compile the kernels, and run the largest step once. Raises StartupError."""
    dtype = choose_cuda_dtype(options)
    ops = CudaEncoderOps(device, config, dtype, options.max_batch_tokens)
    try:
        model = EncoderModel(config, ops, weights, dtype, int8=options.quantize == "int8")
        ops.open()
        model.run(_largest_step(config, options.max_batch_tokens))
        device.synchronize()
    except torch.OutOfMemoryError as error:
        raise StartupError(f"the weights and a step do not fit the GPU: {first_line(error)}") from error
    except (KernelFailed, RuntimeError) as error:
        reason = f"the GPU kernels do not run: {first_line(error)} (last launch: {device.last_launch})"
        raise StartupError(reason) from error
    return ops, model


def _largest_step(config: EncoderConfig, max_tokens: int) -> EncoderRows:
    starts = np.array([*range(0, max_tokens, config.max_context_tokens), max_tokens], np.int32)
    zeros = np.zeros(max_tokens, np.int32)
    return EncoderRows(zeros, starts, zeros)


def _workspace_bytes(config: EncoderConfig, dtype: torch.dtype, max_tokens: int) -> int:
    """Upper bound of what a step allocates, if every buffer of a layer were alive at once, and of its results."""
    hidden, item, matmul = config.hidden_size, dtype.itemsize, BlockedMatmul(BLOCK_ROWS)
    mlp = (2 + config.is_gated) * config.intermediate_size
    products = item * (hidden + 3 * hidden + hidden + hidden + mlp)
    in_fp32 = 4 * hidden * (3 + (6 if config.ropes else 0))
    head_widths = [layer.outputs for head in config.heads for layer in head.layers]
    results = 2 * 4 * max([hidden, *(width for width in head_widths if width != config.vocab_size)])
    logits = BLOCK_ROWS * config.vocab_size * (item + 4) if config.vocab_size in head_widths else 0
    ropes = 4 * config.max_context_tokens * config.head_dim * len(config.ropes)
    return matmul.padded_rows(max_tokens) * (products + in_fp32 + results) + logits + ropes + LIBRARY_BYTES
