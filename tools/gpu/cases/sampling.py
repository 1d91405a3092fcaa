"""Lists the checks of sampling and of log probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.tools.gpu.cases import sampler
from penstock.tools.gpu.cases.check import Check, check_of
from penstock.tools.gpu.cases.comparing import require
from penstock.tools.gpu.cases.elementwise import DTYPES
from penstock.tools.gpu.cases.logprobs import check_logprobs


def wide_checks() -> Iterator[Check]:
    for name, dtype in DTYPES.items():
        for vocab_size in (1, 4097, 151_936):
            greedy = sampler.check_greedy
            yield check_of("sampling", f"greedy.{name}.{vocab_size}", greedy, dtype=dtype, vocab_size=vocab_size)
        yield check_of("sampling", f"logprobs.{name}", check_logprobs, dtype=dtype, vocab_size=20_000)
    yield check_of("sampling", "penalties", sampler.check_penalties, vocab_size=5000, num_steps=12)
    yield check_of("sampling", "noise", sampler.check_noise)
    yield check_of("sampling", "rare_noise", sampler.check_rare_noise)
    yield from _edges()
    yield check_of("sampling", "ties", sampler.check_ties)
    for number, params in enumerate(sampler.FILTERS):
        for name, dtype in DTYPES.items():
            for kind, check in (("filter", sampler.check_filter), ("thresholds", sampler.check_thresholds)):
                yield check_of("sampling", f"{kind}.{name}.{number}", check, params=params, dtype=dtype)
    some: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.5, "top_k": 12}, {"min_p": 0.05, "top_p": 0.9})
    for number, params in enumerate(some):
        yield check_of("sampling", f"chi_square.{number}", sampler.check_distribution, params=params, num_steps=20)


def small_checks() -> Iterator[Check]:
    yield check_of("sampling", "greedy", sampler.check_greedy, dtype=torch.bfloat16, vocab_size=4097)
    yield check_of("sampling", "penalties", sampler.check_penalties, vocab_size=90, num_steps=2)
    every = sampler.FILTERS[-1]
    yield check_of("sampling", "filters", sampler.check_filter, params=every, draws=1200)
    yield check_of("sampling", "overflow", sampler.check_thresholds, params=every, max_listed=8)
    yield check_of("sampling", "logprobs", check_logprobs, dtype=torch.float32, vocab_size=4001)
    yield from _edges()


def invariance_checks() -> Iterator[Check]:
    yield check_of("sampling", "slot", _sampled_in_any_slot)


def _edges() -> Iterator[Check]:
    edges = (sampler.check_biases, sampler.check_counts, sampler.check_fallback, sampler.check_misjudged_rows)
    for name, check in zip(("biases", "counts", "fallback", "misjudged"), edges, strict=True):
        yield check_of("sampling", name, check)


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
