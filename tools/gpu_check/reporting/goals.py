"""The project's performance goals on an H200 with bf16 weights, each with the limit that the hardware sets.

Limits follow from two ceilings measured on an H200: 4.3 TB/s of copying and 790 TFLOP/s of bf16 products. A goal names
the finding that decides it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on one finding: a minimum if at_least, else a maximum. limit is "" if none is computed."""

    finding: str
    title: str
    unit: str
    goal: float
    limit: str = ""
    at_least: bool = True

    def is_met(self, measured: float) -> bool:
        return measured >= self.goal if self.at_least else measured <= self.goal


GOALS = (
    Goal("llama8b.decode.1x1k", "Llama-8B decode, batch 1, context 1k", "tok/s", 225, "284"),
    Goal("llama8b.decode.8x1k", "Llama-8B decode, batch 8, context 1k", "tok/s", 1_650, "2,134"),
    Goal("llama8b.decode.32x1k", "Llama-8B decode, batch 32, context 1k", "tok/s", 5_400, "7,073"),
    Goal("llama8b.decode.64x1k", "Llama-8B decode, batch 64, context 1k", "tok/s", 8_800, "11,514"),
    Goal("llama8b.decode.128x1k", "Llama-8B decode, batch 128, context 1k", "tok/s", 12_800, "16,784"),
    Goal("llama8b.decode.256x1k", "Llama-8B decode, batch 256, context 1k", "tok/s", 15_000, "19,915"),
    Goal("llama8b.decode.64x8k", "Llama-8B decode, batch 64, context 8k", "tok/s", 2_750, "3,275"),
    Goal("llama8b.decode.64x8k.q8_0", "the same with q8_0 KV", "tok/s", 4_200, "5,311"),
    Goal("llama8b.prefill.2k", "Llama-8B prefill, chunks of 2k", "tok/s", 40_000, "54,500"),
    Goal("llama8b.prefill.8k", "Llama-8B prefill, prompt of 8k", "tok/s", 33_000, "49,000"),
    Goal("llama8b.ttft.1k", "TTFT of a 1k prompt, idle", "ms", 28, "18.4", at_least=False),
    Goal("llama8b.mixed.itl_p99_ratio", "ITL p99 under arrivals / median", "x", 2.0, "", at_least=False),
    Goal("llama8b.mixed.ttft_p50", "TTFT p50 at 32 users", "ms", 235, "", at_least=False),
    Goal("attention.decode.64x1k", "decode attention at 256 MB a layer, bf16", "TB/s", 3.6, "4.3"),
    Goal("attention.decode.8x4k", "decode attention 8 × 4k, bf16", "TB/s", 3.0, "4.3"),
    Goal("attention.decode.1x1k", "decode attention 1 × 1k, bf16", "us", 13, "", at_least=False),
    Goal("attention.decode.64x1k.q8_0", "decode attention, q8_0 (its own bytes)", "TB/s", 3.3, "4.3"),
    Goal("attention.decode.64x1k.fp8", "decode attention, fp8 (its own bytes)", "TB/s", 3.3, "4.3"),
    Goal("attention.decode.64x1k.fp32", "decode attention, fp32 (its own bytes)", "TB/s", 3.6, "4.3"),
    Goal("attention.prefill.4k", "prefill attention, causal, 4k", "TFLOP/s", 280, "790"),
    Goal("attention.prefill.8k", "prefill attention, causal, 8k", "TFLOP/s", 280, "790"),
    Goal("sampling.256x128k.plain", "sampling 256 × 128k, temperature alone", "us", 40, "15", at_least=False),
    Goal("sampling.256x128k.filtered", "sampling 256 × 128k, all filters", "us", 120, "31", at_least=False),
    Goal("qwen06b.decode.1x1k", "Qwen3-0.6B decode, batch 1, context 1k", "tok/s", 1_000, "3,280"),
    Goal("qwen06b.offline", "Qwen3-0.6B, 256 requests, 100–1,024 in and out", "tok/s", 20_000, "34,000"),
    Goal("engine.plan_p50", "host time per step at batch 256, p50", "ms", 0.25, "", at_least=False),
    Goal("engine.plan_p99", "host time per step at batch 256, p99", "ms", 1.0, "", at_least=False),
    Goal("engine.gpu_idle", "GPU idle between steps", "%", 2.0, "0", at_least=False),
    Goal("invariance.cost", "cost of bitwise invariance", "%", 5.0, "0", at_least=False),
    Goal("kv.q8_0_tokens_ratio", "tokens of q8_0 KV / tokens of bf16 in one budget", "x", 1.85, "1.88"),
    Goal("peers.transformers_sdpa_ratio", "against transformers' continuous batching, SDPA, 64 × 1k", "x", 5.0),
    Goal("peers.transformers_fa3_ratio", "against the same with FlashAttention 3", "x", 2.0),
    Goal("peers.nano_vllm_ratio", "against nano-vllm with FlashAttention 3, on its own workload", "x", 1.0),
)
