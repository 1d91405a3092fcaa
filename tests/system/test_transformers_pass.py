"""A model that only transformers knows, behind a real server: batched, cached and coalesced as any other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from penstock.tools.random_model import ModelDims, write_random_model
from tests.backend.passes.transformers_model.families import make_family
from tests.system.completions import body, client, metric, read_stream
from tests.system.processes import Frontend, running, start_backend

if TYPE_CHECKING:
    from pathlib import Path

PASS = "penstock.backend.passes.transformers_model.forward_pass:TransformersPass"


def checkpoint(directory: Path) -> Path:
    """A tiny Qwen3-MoE with a tokenizer."""
    write_random_model(
        directory / "tokenizer",
        ModelDims(hidden_size=16, layers=1, heads=1, kv_heads=1, intermediate_size=16, vocab_size=512),
    )
    model = make_family("qwen3-moe", directory / "model")
    for path in (directory / "tokenizer").glob("tokenizer*"):
        (model / path.name).write_bytes(path.read_bytes())
    return model


async def test_mixture_of_experts_is_batched_cached_and_coalesced(tmp_path: Path) -> None:
    socket = tmp_path / "private" / "b.sock"
    options = ("--model", str(checkpoint(tmp_path)), "--dtype", "fp32", "--forward-pass", PASS, "--kv-budget", "16MB")
    prompts = [np.random.default_rng(seed).integers(3, 256, 40).tolist() for seed in range(3)]
    backend = start_backend(socket, *options)
    frontend = Frontend(socket)
    with running(frontend, backend):
        await asyncio.to_thread(frontend.wait_ready)
        async with client() as http:
            alone = [await read_stream(http, frontend.url, body(prompt, 20)) for prompt in prompts]
            assert metric(frontend, "penstock_cached_tokens_total") == 0
            together = await asyncio.gather(*(read_stream(http, frontend.url, body(p, 20)) for p in prompts * 3))
            assert together == alone * 3
        assert metric(frontend, "penstock_requests_coalesced_total") > 0
        assert metric(frontend, "penstock_cached_tokens_total") > 0
