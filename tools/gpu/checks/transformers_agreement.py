"""Compares the forward pass transformers on the GPU with the same model on the CPU, token by token."""

from __future__ import annotations

import importlib
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.tools.gpu.cases.check import require
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.devices.steps import generate
from penstock.tools.gpu.results import Results

_NEEDED = ("transformers", "msgspec")
"""Packages that the pass imports and this check otherwise does not need."""
_ROWS, _PROMPT_TOKENS, _NEW_TOKENS, _PAGE_TOKENS, _PAGES = 5, 37, 24, 16, 5
_VOCAB_SIZE = 200
_COMMON = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
MODELS: dict[str, dict[str, Any]] = {"Llama": _COMMON, "OlmoHybrid": _COMMON | _LINEAR}
"""A model with paged attention alone, and one with layers that keep a state."""


def check_transformers(results: Results, context: DeviceContext) -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    for kind in MODELS:
        name = f"pass.transformers.{kind}"
        if missing:
            results.skipped(name, f"{' and '.join(missing)} cannot be imported")
        else:
            results.attempt(name, partial(_compare, results, context, name, kind))


def _compare(results: Results, context: DeviceContext, name: str, kind: str) -> None:
    """In fp32, with whole prompts and with chunks of 7."""
    with TemporaryDirectory() as directory:
        _write_model(kind, directory)
        try:
            expected = _tokens(directory, None)
        except StartupError as refusal:  # by this version of the package, wherever the model would run
            results.skipped(name, f"the CPU refuses the model: {refusal}")
            return
        for chunk in (1 << 30, 7):
            num_same = int((_tokens(directory, context, chunk) == expected).all(axis=1).sum())
            require(f"only {num_same} of {_ROWS} rows have the CPU's tokens", num_same == _ROWS)
    results.check(name, True, f"{_ROWS} rows of {_NEW_TOKENS} tokens equal the CPU's")


def _write_model(kind: str, directory: str) -> None:
    transformers: Any = importlib.import_module("transformers")
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(directory)


def _tokens(directory: str, context: DeviceContext | None, chunk: int = 1 << 30) -> NDArray[np.int32]:
    from penstock.backend.passes.transformers_model.forward_pass import TransformersPass

    options = PassOptions(device="cpu" if context is None else "cuda:0", dtype="fp32", max_running=_ROWS)
    made = TransformersPass.load_on(Path(directory), options, None if context is None else context.device)
    made.create_cache(_ROWS * _PAGES, _PAGE_TOKENS, "fp32")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, _VOCAB_SIZE, _PROMPT_TOKENS).astype(np.int32) for _ in range(_ROWS)]
    tokens = generate(made, prompts, _NEW_TOKENS, _PAGES, chunk)
    made.close()
    return tokens
