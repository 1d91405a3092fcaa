"""Decodes beside the tokens of a prompt in one step, from a graph and launched kernel by kernel."""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.tools.gpu_check.devices.steps import Steps, launch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.backend.passes.decoder.cuda.forward_pass import CudaDecoderPass
    from penstock.tools.gpu_check.reporting.results import Results

WAYS = {"captured": True, "single": False}
_LEAST_GAIN = 0.02
"""Least gain of a graph: it also computes padding, and may cost other models more than is measured here."""


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """Steps that each have the next token of num_rows sequences of context_tokens, and a prompt's first tokens."""

    num_rows: int
    context_tokens: int
    pages_per_row: int
    vocab_size: int
    num_steps: int

    def run(self, forward_pass: CudaDecoderPass, prompt_tokens: int, *, is_captured: bool) -> float:
        """Return seconds per step, launched one step ahead."""
        draw = np.random.default_rng(1)
        prompt = draw.integers(0, self.vocab_size, prompt_tokens).astype(np.int32)
        parts = [*np.zeros((self.num_rows, 1), np.int32), prompt]
        steps = Steps(self.num_rows + 1, self.pages_per_row)
        steps.context_lens[:] = self.context_tokens - 1
        with nullcontext() if is_captured else launched_singly(forward_pass):
            started_s, pending = time.perf_counter(), None
            for _ in range(self.num_steps):
                steps.context_lens[-1] = 0
                following = launch(forward_pass, steps.prefill(parts))
                if pending is not None:
                    pending.wait()
                pending = following
            if pending is not None:
                pending.wait()
            return (time.perf_counter() - started_s) / self.num_steps


@contextmanager
def launched_singly(forward_pass: CudaDecoderPass) -> Iterator[None]:
    """Launch all steps but decode steps kernel by kernel."""
    graphs = forward_pass._mixed_graphs
    graphs.is_used = False
    try:
        yield
    finally:
        graphs.is_used = True


def compare(
    results: Results, name: str, load: MixedLoad, forward_pass: CudaDecoderPass, prompts_tokens: Sequence[int]
) -> int:
    """Record both ways' times; return up to how many tokens of a prompt graphs are faster, 0 for none."""
    most, is_faster = 0, True
    for prompt_tokens in prompts_tokens:
        seconds = {}
        for way, is_captured in WAYS.items():
            load.run(forward_pass, prompt_tokens, is_captured=is_captured)  # the first steps load
            seconds[way] = load.run(forward_pass, prompt_tokens, is_captured=is_captured)
            case = f"{name}.{load.num_rows}+{prompt_tokens}.{way}"
            results.fact(f"variant.mixed.{case}", seconds[way] * 1e3, "ms")
        is_faster &= seconds["captured"] * (1 + _LEAST_GAIN) <= seconds["single"]
        most = prompt_tokens if is_faster else most
    return most
