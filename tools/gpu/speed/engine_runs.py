"""Measures a model in the engine's loop: the host's time, arrivals among decodes, offline requests."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

import numpy as np

from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import StepSizes

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.forward_pass import IBatchedForwardPass
    from penstock.tools.gpu.devices.device_context import DeviceContext
    from penstock.tools.gpu.results import Results
    from penstock.tools.gpu.speed.engine_loop import EngineLoop, LoopSizes, TokenStream
    from penstock.tools.random_weights import RandomWeights

PAGE_TOKENS = 32
_MAX_TOKEN_ID = 10_000
_NEEDED = ("msgspec", "llguidance")
"""Packages that the engine imports and gpu-check otherwise does not need."""


@dataclass(frozen=True)
class EnginePlan:
    """The loads to run on one model. 0 users, requests or concurrent sequences skip that load."""

    users: int = 0
    """Users, each of whom submits a prompt, waits for its answer and submits the next."""
    user_prompt_tokens: int = 1024
    user_new_tokens: int = 128
    user_batch_tokens: int = 512
    user_s: float = 9.0
    requests: int = 0
    """Requests of random lengths, submitted at once."""
    shortest: int = 100
    longest: int = 1024
    batch_tokens: int = 8192
    num_concurrent: int = 256
    """Sequences that decode together while the host's time is taken."""
    concurrent_prompt_tokens: int = 256
    concurrent_new_tokens: int = 160


LLAMA_ENGINE = EnginePlan(users=32)
QWEN_ENGINE = EnginePlan(requests=256)


def measure_engine(
    results: Results,
    context: DeviceContext,
    name: str,
    config: DecoderConfig,
    weights: RandomWeights,
    dtype: torch.dtype,
    plan: EnginePlan,
    reserve_s: float = 0.0,
) -> None:
    if missing := [package for package in _NEEDED if find_spec(package) is None]:
        results.skipped(f"{name}.engine", f"{' and '.join(missing)} cannot be imported")
        return
    runs = _EngineRuns(results, context, name, config, weights, dtype, plan)
    if plan.num_concurrent:
        results.attempt(f"{name}.concurrent", runs.concurrent, reserve_s)
    if plan.users:
        results.attempt(f"{name}.mixed", runs.mixed, reserve_s + plan.user_s)
    if plan.requests:
        results.attempt(f"{name}.offline", runs.offline, reserve_s)


@dataclass(frozen=True)
class _EngineRuns:
    results: Results
    context: DeviceContext
    name: str
    config: DecoderConfig
    weights: RandomWeights
    dtype: torch.dtype
    plan: EnginePlan

    def concurrent(self) -> None:
        """Decode many sequences together; record the host's time per turn."""
        plan = self.plan
        total = plan.concurrent_prompt_tokens + plan.concurrent_new_tokens
        sizes = _sizes(plan.num_concurrent, plan.batch_tokens, total)
        loop = self._open(sizes)
        rng = np.random.default_rng(1)
        try:
            streams = [
                loop.submit(self._prompt(rng, plan.concurrent_prompt_tokens), plan.concurrent_new_tokens)
                for _ in range(plan.num_concurrent)
            ]
            loop.run(lambda: all(len(stream.token_times_s) > plan.concurrent_new_tokens // 4 for stream in streams))
            loop.turn_s.clear()
            first_step, started_s = loop.num_steps, time.monotonic()
            loop.run(lambda: any(len(stream.token_times_s) > plan.concurrent_new_tokens * 3 // 4 for stream in streams))
            step_us = (time.monotonic() - started_s) * 1e6 / max(loop.num_steps - first_step, 1)
        finally:
            loop.close()
        p50, p99 = (float(np.quantile(loop.turn_s, q)) * 1e3 for q in (0.5, 0.99))
        self.results.fact(f"{self.name}.engine.plan_p50", p50, "ms", f"{plan.num_concurrent} rows")
        self.results.fact(f"{self.name}.engine.plan_p99", p99, "ms")
        self.results.fact(f"{self.name}.engine.step", step_us, "us", "beside the device's time in decode.*.device")

    def mixed(self) -> None:
        """Run closed loops of users, who start one after the other."""
        plan = self.plan
        total = plan.user_prompt_tokens + plan.user_new_tokens
        loop = self._open(_sizes(plan.users, plan.user_batch_tokens, total))
        rng, ends_s = np.random.default_rng(2), time.monotonic() + min(plan.user_s, self.results.remaining_s)
        streams: list[TokenStream] = []

        def submit(_ended: TokenStream | None = None) -> None:
            # Different lengths, so that the users do not stay in step.
            new_tokens = int(rng.integers(plan.user_new_tokens // 2, plan.user_new_tokens + 1))
            streams.append(loop.submit(self._prompt(rng, plan.user_prompt_tokens), new_tokens))

        try:
            for number in range(plan.users):
                submit()
                loop.run(partial(_has_begun, streams[number]))
            num_first = len(streams)
            loop.on_end = submit
            loop.run(lambda: time.monotonic() > ends_s)
        finally:
            loop.close()
        # Skip the users' first requests: there was little load when they started.
        counted = [stream for stream in streams[num_first:] if len(stream.token_times_s) > 1]
        if not counted:
            raise RuntimeError(f"no request started and ended within {plan.user_s:g} s")
        gaps_s = np.concatenate([np.diff(stream.token_times_s) for stream in streams if len(stream.token_times_s) > 1])
        median_s, p99_s = (float(np.quantile(gaps_s, q)) for q in (0.5, 0.99))
        name = f"{self.name}.mixed"
        self.results.fact(f"{name}.ttft_p50", statistics.median(stream.ttft_s for stream in counted) * 1e3, "ms")
        self.results.fact(f"{name}.itl_p50", median_s * 1e3, "ms")
        self.results.fact(f"{name}.itl_p99", p99_s * 1e3, "ms")
        self.results.fact(f"{name}.itl_p99_ratio", p99_s / median_s, "x", f"{len(streams)} requests")

    def offline(self) -> None:
        """Tokens per second from the first submission to the end of the last request."""
        plan = self.plan
        requests = draw_offline_requests(plan.requests, plan.shortest, plan.longest, self.config.vocab_size)
        loop = self._open(_sizes(plan.requests, plan.batch_tokens, 2 * plan.longest))
        try:
            started_s = time.monotonic()
            for prompt, num_new_tokens in requests:
                loop.submit(np.array(prompt, np.int32), num_new_tokens)
            loop.run(lambda: self.results.remaining_s <= 0)
            wall_s = time.monotonic() - started_s
            if loop.num_open:
                raise TimeoutError(f"{loop.num_open} of {plan.requests} requests did not end within {wall_s:.0f} s")
        finally:
            loop.close()
        num_tokens = sum(num_new_tokens for _, num_new_tokens in requests)
        self.results.fact(f"{self.name}.offline", num_tokens / wall_s, "tok/s", f"{num_tokens} tokens, {wall_s:.2f} s")

    def _open(self, sizes: LoopSizes) -> EngineLoop:
        from penstock.tools.gpu.speed.engine_loop import EngineLoop

        def make() -> IBatchedForwardPass:
            steps = StepSizes(
                sizes.max_running, sizes.max_batch_tokens, sizes.max_context_tokens, choices=self.context.choices
            )
            made = CudaDecoderPass(self.config, self.weights, self.context.make_device(), self.dtype, steps)
            made.create_cache(sizes.num_pages, sizes.page_tokens, "bf16")
            return cast("IBatchedForwardPass", made)

        self.context.device.synchronize()  # the weights are made in another stream
        return EngineLoop(make, sizes)

    def _prompt(self, rng: np.random.Generator, num_tokens: int) -> NDArray[np.int32]:
        return rng.integers(0, self.config.vocab_size, num_tokens).astype(np.int32)


def _has_begun(stream: TokenStream) -> bool:
    return len(stream.token_times_s) > 0


def _sizes(max_running: int, max_batch_tokens: int, max_context_tokens: int) -> LoopSizes:
    from penstock.tools.gpu.speed.engine_loop import LoopSizes

    pages = -(-(max_context_tokens + PAGE_TOKENS) // PAGE_TOKENS)
    return LoopSizes(max_running * pages, PAGE_TOKENS, max_running, max_batch_tokens, pages * PAGE_TOKENS)


def draw_offline_requests(count: int, shortest: int, longest: int, vocab_size: int) -> list[tuple[list[int], int]]:
    """Draw prompts, and numbers of new tokens, uniformly, in the same order as nano-vllm's benchmark, from seed 0.

    256 requests of 100 to 1,024 tokens are exactly its workload: 133,966 new tokens.
    """
    draw = random.Random(0)  # noqa: S311 - fixed seed, so that all engines get the same lengths
    most = min(_MAX_TOKEN_ID, vocab_size - 1)
    prompts = [[draw.randint(0, most) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]
    return [(prompt, draw.randint(shortest, longest)) for prompt in prompts]
