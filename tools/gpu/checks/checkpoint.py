"""Compares the greedy tokens of a trained checkpoint on the GPU with plain torch's on the CPU.

A GGUF file, which may have come in parts (`split -b 55M FILE FILE.`): they are joined in the order of their names.
"""

from __future__ import annotations

import os
import shutil
from glob import escape, glob
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backend.dtypes import Dtype
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.cpu.in_torch.torch_ops import TorchOps
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from penstock.tools.gpu.checks.pass_agreement import require_same_tokens
from penstock.tools.gpu.devices import device_context
from penstock.tools.gpu.devices.steps import generate
from penstock.tools.gpu.items import Item
from penstock.tools.gpu.results import CHECKPOINT_VARIABLE, Results

_ROWS, _PROMPT_TOKENS, _NEW_TOKENS, _PAGE_TOKENS, _PAGES = 4, 24, 24, 16, 4
_TIES = {"fp32": 1e-4, "bf16": 3e-2}
"""The most by which the logit of another token may be below that of the CPU's token in fp32, relative to the largest
logit."""


def run(results: Results, item: Item) -> None:
    prefix = os.environ.get(CHECKPOINT_VARIABLE, "")
    parts = sorted(glob(f"{escape(prefix)}*")) if prefix else []
    if not parts or find_spec("msgspec") is None:
        results.skipped(item.name, "msgspec cannot be imported" if parts else "--checkpoint names no file")
        return
    with TemporaryDirectory() as directory:
        path = Path(directory, "model.gguf")
        with path.open("wb") as whole:
            for part in parts:
                with open(part, "rb") as file:
                    shutil.copyfileobj(file, whole)
        _compare(results, item.name, path)


def _compare(results: Results, name: str, path: Path) -> None:
    from penstock.backend.checkpoint.config_json import read_decoder_config
    from penstock.backend.checkpoint.gguf.directory import gguf_directory
    from penstock.backend.checkpoint.weights import open_weights

    path = gguf_directory(path)
    config = read_decoder_config(path, _PAGES * _PAGE_TOKENS)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, config.vocab_size, _PROMPT_TOKENS).astype(np.int32) for _ in range(_ROWS)]

    def tokens(forward_pass: CpuDecoderPass | CudaDecoderPass) -> NDArray[np.int32]:
        made = generate(forward_pass, prompts, _NEW_TOKENS, _PAGES)
        forward_pass.close()
        return made

    def on_cpu() -> CpuDecoderPass:
        """In fp32 by plain torch, which shares no code with our kernels."""
        with open_weights(path, config) as weights:
            made = CpuDecoderPass(config, weights, TorchOps(config, torch.float32), Dtype.FP32, _ROWS)
        made.create_cache(_ROWS * _PAGES, _PAGE_TOKENS, "fp32")
        return made

    expected, longest = tokens(on_cpu()), _PAGES * _PAGE_TOKENS
    for dtype, tie in _TIES.items():
        options = PassOptions(device="cuda:0", dtype=dtype, max_running=_ROWS, max_context_tokens=longest)
        made = CudaDecoderPass.load(path, options, device_context.open_device_context().device)
        made.create_cache(_ROWS * _PAGES, _PAGE_TOKENS, dtype)
        found = tokens(made)
        require_same_tokens(on_cpu, prompts, found, expected, tie)
        same = int((found == expected).sum())
        results.check(f"{name}.{dtype}", True, f"of {expected.size} tokens equal the CPU's; the others tie", same)
