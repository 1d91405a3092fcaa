"""The smallest models that the kernels support, their oracle (transformers), and the emulated CUDA pass."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.backend.forward_pass import PassOptions
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.decoder.driver import Driver, DriverRow
from tests.checkpoints import load_oracle, make_checkpoint
from tests.temporary import make_shared_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Prompt = tuple[int, ...]

VOCAB_SIZE = 200
MAX_ROWS = 6
RAGGED = (1, 7, 16, 17, 40)
_ALTERNATING = ["sliding_attention", "full_attention"]
_DELTA_RULE = {"linear_key_head_dim": 64, "layer_types": ["linear_attention", "full_attention"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama3": {},
    "llama-tied": {"num_attention_heads": 8},
    "llama-bias": {},
    "mistral": {},
    "ministral3": {},
    "qwen2": {"num_key_value_heads": 1},
    "qwen2-window": {},
    "qwen3": {},
    "qwen3-moe": {"num_experts": 40},
    "qwen2-moe": {"num_key_value_heads": 1},
    "mixtral": {},
    "gpt-oss": {},
    "smollm3-window": {"num_hidden_layers": 3},
    "phi3-partial": {"hidden_size": 256},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma": {},
    "granite": {},
    "glm": {},
    "gemma2": {},
    "gemma3": {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "olmo2": {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128},
    "olmo3": {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128},
    "glm4": {},
    "cohere": {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128},
    "cohere-qk-norm": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256},
    "cohere2": {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128, "layer_types": _ALTERNATING},
    "starcoder2": {},
    "qwen3.5": _DELTA_RULE,
    # The last layer has a delta rule, and the first one experts.
    "qwen3-next": _DELTA_RULE | {"layer_types": ["full_attention", "linear_attention"]},
    "gemma4-e": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": [*_ALTERNATING, *_ALTERNATING],
        "global_head_dim": 512,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "gemma3n": {
        "num_hidden_layers": 4,
        "layer_types": [*_ALTERNATING, *_ALTERNATING],
        "activation_sparsity_pattern": [0.95, 0.0, 0.5, 0.0],
        "vocab_size_per_layer_input": VOCAB_SIZE - 20,
    },
    "gemma4-moe": {"layer_types": _ALTERNATING, "global_head_dim": 128},
}


@cache
def checkpoint(architecture: str, **more_settings: int) -> Path:
    """Make the smallest checkpoint that the kernels support; head_dim is at least 64."""
    smallest = {"num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, "head_dim": 64}
    settings = smallest | ARCHITECTURES[architecture] | more_settings
    if architecture.startswith(("phi3", "olmo", "cohere")):  # their configs have no head_dim
        del settings["head_dim"]
    return make_checkpoint(architecture, make_shared_directory(), **settings)


@cache
def oracle(architecture: str) -> Any:
    return load_oracle(checkpoint(architecture))


def oracle_logits(architecture: str, tokens: Sequence[int]) -> NDArray[np.float32]:
    """[n, vocab]"""
    with torch.inference_mode():
        logits: NDArray[np.float32] = oracle(architecture)(torch.tensor([tokens])).logits[0].numpy()
    return logits


def options(dtype: str = "fp32", max_batch_tokens: int = 128) -> PassOptions:
    return PassOptions(dtype=dtype, max_running=MAX_ROWS, max_batch_tokens=max_batch_tokens)


def make_pass(architecture: str = "llama3", dtype: str = "fp32", max_batch_tokens: int = 128) -> EmulatedCudaPass:
    return EmulatedCudaPass.load(checkpoint(architecture), options(dtype, max_batch_tokens))


def make_driver(architecture: str = "llama3", kv_dtype: str = "fp32", dtype: str = "fp32", seed: int = 0) -> Driver:
    return Driver(make_pass(architecture, dtype), num_pages=32, page_size=16, kv_dtype=kv_dtype, seed=seed)


def prompts(lengths: tuple[int, ...] = RAGGED, seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, VOCAB_SIZE, n).tolist()) for n in lengths]


def run_prompts(driver: Driver, batch: list[Prompt], chunk: int | None = None) -> list[NDArray[np.float32]]:
    """Return the logits of each prompt's last token."""
    rows = [driver.add(prompt) for prompt in batch]
    logits = driver.prefill(chunk)
    return [logits[row.slot] for row in rows]


def decode_replays(forward_pass: Any) -> int:
    """Return how many decode steps a graph has run."""
    return sum(graph.num_replays for graph in forward_pass._graphs._graphs.values())


def generated(row: DriverRow) -> list[int]:
    return row.tokens[row.num_prompt_tokens :]


def greedy_choices(architecture: str, row: DriverRow) -> list[int]:
    """Return the oracle's greedy choice for each generated token, given all tokens before it."""
    choices = oracle_logits(architecture, row.tokens[:-1]).argmax(axis=1)[row.num_prompt_tokens - 1 :]
    chosen: list[int] = choices.tolist()
    return chosen
