"""Every prediction, by its finding's name. `python3 -m penstock.tools.gpu_check.prediction.predictions` prints them.

A prediction is written before its measurement. One that misses by over 20 % is marked: something was not understood.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.tools.gpu_check.prediction.kernels import KV_BYTES, KernelTimes, kernel_times
from penstock.tools.gpu_check.prediction.machine import H200, Machine, machine_of
from penstock.tools.gpu_check.prediction.models import LLAMA_8B, QWEN3_06B, ModelTimes
from penstock.tools.gpu_check.reporting.goals import GOALS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gpu" / "predictions.md"
_DECODE = ((1, 1024), (8, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024), (8, 8192), (64, 8192))
_ATTENTION = (
    (64, 1024, "bf16"), (8, 4096, "bf16"), (1, 1024, "bf16"), (64, 1024, "q8_0"), (64, 1024, "fp8"), (64, 1024, "fp32"),
    (256, 1024, "bf16"), (64, 8192, "bf16"), (1, 32_768, "bf16"), (8, 1024, "bf16"), (64, 8192, "q8_0"),
)  # fmt: skip
_MIXED_ROWS, _MIXED = 8, (64, 128, 256, 512)
_PREFILL = (("4k", 0, 4096), ("8k", 0, 8192), ("1k", 0, 1024), ("1k_after_8k", 8192, 1024))


@dataclass(frozen=True, slots=True)
class Prediction:
    value: float
    unit: str
    is_computed: bool = True
    """False for an estimate from others' publications."""


def make_predictions(machine: Machine = H200) -> dict[str, Prediction]:
    times = kernel_times(machine)
    found = _attention(times) | _sampling(times)
    for name, shape in (("llama8b", LLAMA_8B), ("qwen06b", QWEN3_06B)):
        found |= _model(name, ModelTimes(times, shape))
    found |= _loads(times)
    found["kv.q8_0_tokens_ratio"] = Prediction(KV_BYTES["bf16"] / KV_BYTES["q8_0"], "x")
    return found | _taken_over(found)


def predicted_values(gpu: str) -> dict[str, float]:
    """The predictions for a GPU by its name; none for one whose constants are not known."""
    machine = machine_of(gpu)
    return {} if machine is None else {name: each.value for name, each in make_predictions(machine).items()}


def _attention(times: KernelTimes) -> dict[str, Prediction]:
    found, heads = {}, LLAMA_8B.heads
    for rows, tokens, kv_dtype in _ATTENTION:
        us = times.decode_attention(heads, rows, tokens, kv_dtype)
        num_bytes = rows * tokens * 2 * heads.num_kv_heads * heads.head_dim * KV_BYTES[kv_dtype]
        name = f"attention.decode.{rows}x{tokens // 1024}k" + ("" if kv_dtype == "bf16" else f".{kv_dtype}")
        found[name] = Prediction(us, "us") if rows == 1 else Prediction(num_bytes / us / 1e6, "TB/s")
    for name, history, tokens in _PREFILL:
        us = times.prefill_attention(heads, history, tokens, "bf16")
        flop = 4 * (tokens * history + tokens * (tokens + 1) / 2) * heads.num_heads * heads.head_dim
        found[f"attention.prefill.{name}"] = Prediction(flop / us / 1e6, "TFLOP/s")
        without_us = times.prefill_attention(heads, history, tokens, "bf16", wgmma=False)
        found[f"variant.query_rows+key_tokens+wgmma.128+64+1.attention.prefill.{name}"] = Prediction(us, "us")
        found[f"variant.query_rows+key_tokens+wgmma.128+64+0.attention.prefill.{name}"] = Prediction(without_us, "us")
    return found


def _sampling(times: KernelTimes) -> dict[str, Prediction]:
    return {
        f"sampling.256x128k.{name}": Prediction(times.sampling(256, LLAMA_8B.vocab_size, filtered=filtered), "us")
        for name, filtered in (("plain", False), ("filtered", True))
    }


def _model(name: str, model: ModelTimes) -> dict[str, Prediction]:
    machine = model.kernels.machine
    found = {
        f"{name}.decode.{rows}x{tokens // 1024}k": Prediction(rows / model.decode_step(rows, tokens) * 1e6, "tok/s")
        for rows, tokens in _DECODE
    }
    for tokens, label in ((1024, "1k"), (2048, "2k"), (8192, "8k"), (32_768, "32k")):
        found[f"{name}.prefill.{label}"] = Prediction(tokens / model.prefill(tokens) * 1e6, "tok/s")
    for rows, tokens, kv_dtype in ((64, 8192, "q8_0"), (256, 1024, "q8_0"), (64, 8192, "fp8")):
        rate = rows / model.decode_step(rows, tokens, kv_dtype) * 1e6
        found[f"{name}.decode.{rows}x{tokens // 1024}k.{kv_dtype}"] = Prediction(rate, "tok/s")
    found[f"{name}.ttft.1k"] = Prediction((model.prefill(1024) + machine.round_trip_us) / 1e3, "ms")
    for prompt_tokens in _MIXED:
        for way, is_captured in (("captured", True), ("single", False)):
            us = model.mixed_step(_MIXED_ROWS, 1024, prompt_tokens, is_captured=is_captured)
            found[f"variant.mixed.{name}.{_MIXED_ROWS}+{prompt_tokens}.{way}"] = Prediction(us / 1e3, "ms")
    offline_us, num_tokens = model.offline()
    found[f"{name}.offline"] = Prediction(num_tokens / offline_us * 1e6, "tok/s")
    return found


def _loads(times: KernelTimes) -> dict[str, Prediction]:
    """32 users of 1k prompts, in steps of at most 512 tokens beside the other users' decodes."""
    model = ModelTimes(times, LLAMA_8B)
    decode_us = model.decode_step(32, 1024)
    mixed_us = model.prefill_step(512) + times.decode_attention(LLAMA_8B.heads, 32, 1024, "bf16") * LLAMA_8B.num_layers
    return {
        "llama8b.mixed.itl_p99_ratio": Prediction(mixed_us / decode_us, "x"),
        # A request comes in the middle of a step, and prompts seldom meet: users end at different times.
        "llama8b.mixed.ttft_p50": Prediction(2.5 * mixed_us / 1e3, "ms"),
    }


def _taken_over(computed: dict[str, Prediction]) -> dict[str, Prediction]:
    """Figures that our arithmetic does not predict."""
    ours = computed["llama8b.decode.64x1k"].value
    theirs = 0.4 * 11_514  # 28.6 ms a step of 32 rows of 8k is 0.4 of the limit there
    return {
        "engine.plan_p50": Prediction(0.2, "ms", is_computed=False),
        "engine.plan_p99": Prediction(0.8, "ms", is_computed=False),
        "engine.gpu_idle": Prediction(1.0, "%", is_computed=False),
        "invariance.cost": Prediction(3.0, "%", is_computed=False),
        "peers.transformers_fa3_ratio": Prediction(ours / theirs, "x", is_computed=False),
        "peers.transformers_sdpa_ratio": Prediction(8.0, "x", is_computed=False),
        "peers.nano_vllm_ratio": Prediction(computed["qwen06b.offline"].value / (0.6 * 34_000), "x", is_computed=False),
    }


def table_lines(predictions: dict[str, Prediction]) -> list[str]:
    """The goals' table with the predicted column, in Markdown."""
    lines = ["| | unit | limit | goal | predicted |", "|---|---|---|---|---|"]
    for goal in GOALS:
        predicted = predictions[goal.finding]
        mark = "" if predicted.is_computed else " (taken over)"
        bound = f"{'≥' if goal.at_least else '≤'} {goal.goal:,g}"
        lines.append(f"| {goal.title} | {goal.unit} | {goal.limit} | {bound} | {_shown(predicted.value)}{mark} |")
    return lines


def _shown(value: float) -> str:
    """Three digits: no prediction is more exact."""
    return f"{float(f'{value:.3g}'):,g}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("predictions", description="Predicts the figures of a run on an H200.")
    parser.add_argument("--save", action="store_true", help=f"replace the table in {PAGE.name}")
    predictions = make_predictions()
    lines = table_lines(predictions)
    if parser.parse_args(argv).save:
        before = PAGE.read_text(encoding="utf-8").partition(lines[0])[0]
        PAGE.write_text(before + "\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    goals = {goal.finding for goal in GOALS}
    for name, predicted in predictions.items():
        if name not in goals:
            print(f"{name}: {_shown(predicted.value)} {predicted.unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
