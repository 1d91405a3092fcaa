"""Lists the checks of sampling."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from penstock.backend.passes.decoder.cuda.device.launcher import Launcher
from penstock.tools.gpu_check.cases.check import Check
from penstock.tools.gpu_check.cases.comparing import require
from penstock.tools.gpu_check.cases.elementwise.operations import DTYPES
from penstock.tools.gpu_check.cases.sampling import logprobs, sampler


def wide_checks() -> Iterator[Check]:
    for name, dtype in DTYPES.items():
        for vocab_size in (1, 4097, 151_936):
            run = partial(sampler.check_greedy, dtype=dtype, vocab_size=vocab_size)
            yield Check("sampling", f"greedy.{name}.{vocab_size}", run, dtype == torch.bfloat16)
        with_logprobs = partial(logprobs.check_logprobs, dtype=dtype, vocab_size=20_000)
        yield Check("sampling", f"logprobs.{name}", with_logprobs, dtype == torch.bfloat16)
    yield Check("sampling", "penalties", partial(sampler.check_penalties, vocab_size=5000, num_steps=12))
    yield Check("sampling", "noise", sampler.check_noise)
    yield Check("sampling", "rare_noise", sampler.check_rare_noise)
    yield from _edges()
    yield Check("sampling", "ties", sampler.check_ties)
    for number, params in enumerate(sampler.FILTERS):
        for name, dtype in DTYPES.items():
            kept = partial(sampler.check_filter, params=params, dtype=dtype)
            yield Check("sampling", f"filter.{name}.{number}", kept, dtype == torch.bfloat16)
            thresholds = partial(sampler.check_thresholds, params=params, dtype=dtype)
            yield Check("sampling", f"thresholds.{name}.{number}", thresholds, dtype == torch.bfloat16)
    some: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.5, "top_k": 12}, {"min_p": 0.05, "top_p": 0.9})
    for number, params in enumerate(some):
        run = partial(sampler.check_distribution, params=params, num_steps=20)
        yield Check("sampling", f"chi_square.{number}", run)


def small_checks() -> Iterator[Check]:
    yield Check("sampling", "greedy", partial(sampler.check_greedy, dtype=torch.bfloat16, vocab_size=4097))
    yield Check("sampling", "penalties", partial(sampler.check_penalties, vocab_size=90, num_steps=2))
    every = sampler.FILTERS[-1]
    yield Check("sampling", "filters", partial(sampler.check_filter, params=every, draws=1200))
    yield Check("sampling", "overflow", partial(sampler.check_thresholds, params=every, max_listed=8))
    yield Check("sampling", "logprobs", partial(logprobs.check_logprobs, dtype=torch.float32, vocab_size=4001))
    yield from _edges()


def invariance_checks() -> Iterator[Check]:
    yield Check("sampling", "slot", _sampled_in_any_slot)


def _edges() -> Iterator[Check]:
    yield Check("sampling", "biases", sampler.check_biases)
    yield Check("sampling", "counts", sampler.check_counts)
    yield Check("sampling", "fallback", sampler.check_fallback)
    yield Check("sampling", "misjudged", sampler.check_misjudged_rows)


def _sampled_in_any_slot(launcher: Launcher) -> None:
    vocab_size = 4200
    mine = sampler.random_logits(vocab_size, seed=1)
    params: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "top_k": 200, "seed": 77, "repetition_penalty": 1.3}
    alone, crowded = (sampler.SamplingDevice(launcher, vocab_size, 8) for _ in range(2))
    alone.take(sampler.slot_init(0, [4, 5], **params))
    crowded.take(sampler.slot_init(5, [4, 5], **params))
    crowded.take(*(sampler.slot_init(slot, seed=slot, temperature=slot / 2, top_k=slot) for slot in (1, 2, 3)))
    for position in range(2, 6):
        expected = alone.sample(mine[None], [0], position)
        logits = sampler.random_logits(4, vocab_size, seed=position)
        logits[position % 4] = mine
        slots = [1, 2, 3]
        slots.insert(position % 4, 5)
        found = crowded.sample(logits, slots, position)[position % 4 : position % 4 + 1]
        require(f"position {position} gives {found}, alone {expected}", found == expected)
