"""The engine's loop without a server: users among each other, and requests that all come at once."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import StepSizes
from penstock.tools.gpu.devices import device_context
from penstock.tools.random_weights import LLAMA_8B, QWEN3_06B, RandomWeights

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.forward_pass import IBatchedForwardPass
    from penstock.tools.gpu.devices.device_context import DeviceContext
    from penstock.tools.gpu.items import Item
    from penstock.tools.gpu.results import Results
    from penstock.tools.gpu.speed.engine_loop import EngineLoop, TokenStream

PAGE_TOKENS = 32
_MAX_TOKEN_ID = 10_000
_NEEDED = ("msgspec", "llguidance")
"""Packages that the engine imports and gpu-check otherwise does not need."""


@dataclass(frozen=True)
class Load:
    """Sequences of a model, and the largest step."""

    config: DecoderConfig
    count: int
    shortest: int
    """Fewest tokens of a prompt, and of an answer; users' answers have at least half of `new_tokens`."""
    longest: int
    batch_tokens: int
    new_tokens: int = 0
    seconds: float = 0.0
    """Users submit for so long: each a prompt of `longest` tokens, after its answer the next."""
    dtype: torch.dtype = torch.bfloat16


LOADS = {
    "users": Load(LLAMA_8B, 32, 64, 1024, 512, 128, 9.0),
    "offline": Load(QWEN3_06B, 256, 100, 1024, 8192),
}


def run(results: Results, item: Item) -> None:
    if missing := [package for package in _NEEDED if find_spec(package) is None]:
        results.skipped(item.name, f"{' and '.join(missing)} cannot be imported")
        return
    context, load = device_context.open_device_context(), LOADS[item.arguments[0]]
    context.memory.reset_peak()
    loop = open_loop(context, load)
    try:
        if load.seconds:
            _serve_users(results, item.name, load, loop)
        else:
            _serve_all(results, item.name, load, loop)
    finally:
        loop.close()
    context.memory.reset_peak()


def _serve_users(results: Results, name: str, load: Load, loop: EngineLoop) -> None:
    """Run closed loops of users, who start one after the other."""
    rng, ends_s = np.random.default_rng(2), time.monotonic() + min(load.seconds, results.remaining_s)
    streams: list[TokenStream] = []

    def submit(_ended: TokenStream | None = None) -> None:
        # Different lengths, so that the users do not stay in step.
        prompt = rng.integers(0, load.config.vocab_size, load.longest).astype(np.int32)
        streams.append(loop.submit(prompt, int(rng.integers(load.new_tokens // 2, load.new_tokens + 1))))

    for number in range(load.count):
        submit()
        loop.run(lambda stream=streams[number]: bool(stream.token_times_s))  # type: ignore[misc]
    loop.on_end = submit
    loop.run(lambda: time.monotonic() > ends_s)
    # Skip the users' first requests: there was little load when they started.
    counted = [stream for stream in streams[load.count :] if len(stream.token_times_s) > 1]
    if not counted:
        raise RuntimeError(f"no request started and ended within {load.seconds:g} s")
    gaps_s = np.concatenate([np.diff(stream.token_times_s) for stream in streams if len(stream.token_times_s) > 1])
    median_s, p99_s = (float(np.quantile(gaps_s, q)) for q in (0.5, 0.99))
    first_s = statistics.median(stream.token_times_s[0] - stream.submitted_s for stream in counted)
    results.fact(f"{name}.ttft_p50", first_s * 1e3, "ms")
    results.fact(f"{name}.itl_p50", median_s * 1e3, "ms")
    results.fact(f"{name}.itl_p99", p99_s * 1e3, "ms", f"{p99_s / median_s:.2f} medians, {len(streams)} requests")


def _serve_all(results: Results, name: str, load: Load, loop: EngineLoop) -> None:
    """Tokens per second from the first submission to the end of the last request."""
    requests = draw_requests(load.count, load.shortest, load.longest, load.config.vocab_size)
    started_s = time.monotonic()
    for prompt, num_new_tokens in requests:
        loop.submit(np.array(prompt, np.int32), num_new_tokens)
    loop.run(lambda: results.remaining_s <= 0)
    wall_s = time.monotonic() - started_s
    if loop.num_open:
        raise TimeoutError(f"{loop.num_open} of {load.count} requests did not end within {wall_s:.0f} s")
    num_tokens = sum(num_new_tokens for _, num_new_tokens in requests)
    results.fact(name, num_tokens / wall_s, "tok/s", f"{num_tokens} tokens, {wall_s:.2f} s")


def open_loop(context: DeviceContext, load: Load) -> EngineLoop:
    from penstock.tools.engine_rig import RigSizes
    from penstock.tools.gpu.speed.engine_loop import EngineLoop

    pages = -(-(load.longest + (load.new_tokens or load.longest) + PAGE_TOKENS) // PAGE_TOKENS)
    sizes = RigSizes(
        num_pages=load.count * pages, page_size_tokens=PAGE_TOKENS, max_running=load.count,
        max_batch_tokens=load.batch_tokens,
    )  # fmt: skip
    weights = RandomWeights(load.config, load.dtype, context.torch_device)

    def make() -> IBatchedForwardPass:
        steps = StepSizes(load.count, load.batch_tokens, pages * PAGE_TOKENS, choices=context.choices)
        made = CudaDecoderPass(load.config, weights, context.make_device(), load.dtype, steps)
        made.create_cache(sizes.num_pages, PAGE_TOKENS, "bf16")
        return cast("IBatchedForwardPass", made)

    context.device.synchronize()  # the weights are made in another stream
    return EngineLoop(make, sizes, pages * PAGE_TOKENS)


def draw_requests(count: int, shortest: int, longest: int, vocab_size: int) -> list[tuple[list[int], int]]:
    """Draw prompts, and numbers of new tokens, uniformly, in the same order as nano-vllm's benchmark, from seed 0.

    256 requests of 100 to 1,024 tokens are exactly its workload: 133,966 new tokens.
    """
    draw = random.Random(0)  # noqa: S311 - fixed seed, so that all engines get the same lengths
    most = min(_MAX_TOKEN_ID, vocab_size - 1)
    prompts = [[draw.randint(0, most) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]
    return [(prompt, draw.randint(shortest, longest)) for prompt in prompts]
