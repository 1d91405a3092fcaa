"""Checks log probabilities of sampled, likeliest and named tokens against the host's and torch, and lists the checks of
sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.backend.forward_pass import StepBatch, TokenMasks
from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.backend.passes.cuda.step.device_sampler import DeviceSampler, LogprobBuffers, SlotArrays
from penstock.backend.passes.cuda.step.draft_sampling import DraftSampling
from penstock.backend.passes.cuda.step.step_results import MAX_NAMED_LOGPROBS
from penstock.backend.sampling.logprobs import token_logprobs, with_named_tokens
from penstock.tools.gpu.cases import sampler
from penstock.tools.gpu.cases.check import Check, check_of, require, require_close
from penstock.tools.gpu.cases.elementwise import DTYPES
from penstock.tools.gpu.cases.sampler import CPU, POISON, random_logits


def report(
    launcher: Launcher,
    slots: SlotArrays,
    logits: Tensor,
    tokens: list[int],
    rows: list[int],
    num_likeliest: int,
    named: Sequence[tuple[int, ...]] = (),
) -> LogprobBuffers:
    """named: for each row the tokens that it names, if any."""
    num_rows = len(rows)
    width = max([num_likeliest, *map(len, named)])
    padded = torch.tensor([(*ids, *[-1] * (width - len(ids))) for ids in named], dtype=torch.int32).ravel()
    out = LogprobBuffers(
        torch.full((num_rows,), 99.0),
        torch.full((num_rows,), POISON, dtype=torch.int32),
        torch.full((num_rows, width), POISON, dtype=torch.int32),
        torch.full((num_rows, width), 99.0),
    )
    given, places = torch.tensor(tokens, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32)
    DeviceSampler(launcher, slots, logits.dtype).logprobs(logits, given, places, out, padded, num_likeliest)
    return out


def check_logprobs(launcher: Launcher, dtype: torch.dtype, vocab_size: int) -> float:
    logits = torch.from_numpy(random_logits(3, vocab_size, scale=4.0)).to(dtype)
    logits[1, 10:15] = logits[1].max()
    logits[2, 5] = -torch.inf
    tokens = [3, 12, 5]
    out = report(launcher, SlotArrays(3, vocab_size, CPU), logits, tokens, [0, 2, 1], 20)
    expected = token_logprobs(logits.float().numpy(), np.array(tokens, np.int32), np.array([0, 2, 1]), 20)
    softmax = torch.log_softmax(logits.double(), dim=-1)
    require("ranks differ", out.ranks.tolist() == expected.ranks.tolist())
    require("the top tokens differ", out.top_ids.tolist() == expected.top_ids.tolist())
    require_close("the top tokens' log probabilities", out.top, torch.from_numpy(expected.top), 0, 2e-5)
    _check_named(launcher, logits, tokens)
    return require_close("log probabilities", out.chosen, softmax[[0, 2, 1], [3, 5, 12]], 0, 2e-5)


def _check_named(launcher: Launcher, logits: Tensor, tokens: list[int]) -> None:
    """A row that names as many tokens as it may, one that names the token it lacks and one of no tokens."""
    vocab_size = logits.shape[1]
    many = tuple(sorted({token * 7919 % vocab_size for token in range(MAX_NAMED_LOGPROBS)}, reverse=True))
    named, rows = [many, (5,), ()], [0, 2, 1]
    out = report(launcher, SlotArrays(3, vocab_size, CPU), logits, tokens, rows, 4, named)
    values, sampled = logits.float().numpy(), np.array(tokens, np.int32)
    expected = with_named_tokens(token_logprobs(values, sampled, np.array(rows), 4), values, sampled, named)
    require("ranks beside named tokens differ", out.ranks.tolist() == expected.ranks.tolist())
    for place, ids in enumerate(named):
        width = len(ids) or 4
        require(
            "the reported tokens differ",
            out.top_ids[place, :width].tolist() == expected.top_ids[place, :width].tolist(),
        )
        require(
            "unused columns differ",
            bool((out.top_ids[place, width:] == -1).all() and out.top[place, width:].isnan().all()),
        )
        top = torch.from_numpy(expected.top[place, :width])
        require_close("the reported log probabilities", out.top[place, :width].exp(), top.exp(), 0, 2e-5)


def check_drafts(launcher: Launcher, vocab_size: int, samples: Launcher | None = None) -> None:
    """Check a row with penalties whose third draft is wrong, one with masks at its first two positions, one with a
    filter and biases, and one without drafts, against steps of one token. samples: another launcher for these."""
    inits = (
        sampler.slot_init(3, [4, 5], 1, seed=1, temperature=0.8, frequency_penalty=2.0, repetition_penalty=1.5),
        sampler.slot_init(0, seed=2, temperature=0.8),
        sampler.slot_init(1, seed=3, top_k=9, logit_bias=((7, 4.0), (vocab_size - 9, 5.0))),
        sampler.slot_init(2, seed=4, temperature=0.7),
    )
    order, num_drafts = [2, 3, 0, 1], np.array([0, 3, 3, 2], np.int32)
    logits = random_logits(4, 5, vocab_size, scale=3.0)
    logits[1, 1:] = logits[1, 0]  # it would draw one token again and again
    masks = sampler.mask_of(vocab_size, {0: list(range(3, vocab_size, 5)), 1: list(range(0, vocab_size, 4))})
    alone, device = (sampler.SamplingDevice(samples or launcher, vocab_size, size) for size in (4, 4 + 12))
    alone.take(*inits)
    drawn = []
    for step in range(4):
        masked = TokenMasks(np.array([2], np.int32), masks.bits[step : step + 1]) if step < 2 else None
        drawn.append(alone.sample(logits[:, step], order, 9 + step, masked))
    columns = np.array(drawn).T
    columns[1, 2] = (columns[1, 2] + 1) % vocab_size
    ids = [-1, *(token for row in (1, 2, 3) for token in (-1, *columns[row, : num_drafts[row]]))]
    batch = StepBatch(
        input_ids=np.array(ids, np.int32),
        query_starts=np.cumsum([0, *(1 + num_drafts)]).astype(np.int32),
        context_lens=np.full(4, 8, np.int32),
        page_table=np.zeros((4, 1), np.int32),
        slots=np.array(order, np.int32),
        logit_rows=np.arange(4, dtype=np.int32),
        drafts=num_drafts,
    )
    tokens = batch.logit_tokens
    rows = np.concatenate([np.arange(4), np.repeat(np.arange(4), num_drafts)])
    steps = tokens - batch.query_starts[rows]
    sent = (torch.from_numpy(ints.astype(np.int32)) for ints in (batch.input_ids, tokens, batch.slots[rows]))
    drafts = DraftSampling(launcher, device.slots, 4, (next(sent), next(sent), next(sent)))
    device.take(*inits)
    slots, packed = map(torch.from_numpy, drafts.pack(batch, num_drafts))
    found, accepted = (torch.full((size,), POISON, dtype=torch.int32) for size in (len(rows), 4))
    mask_rows = torch.full((len(rows),), -1, dtype=torch.int32)
    masked_rows = [int(np.flatnonzero((rows == 2) & (steps == step))[0]) for step in range(2)]
    mask_rows[masked_rows] = torch.arange(2, dtype=torch.int32)
    drafts.open(packed.ravel())
    device.sampler.sample(
        torch.from_numpy(logits[rows, steps]), slots, torch.from_numpy((8 + steps).astype(np.int32)),
        device.sampler.features(batch.slots), found, (mask_rows, torch.from_numpy(masks.bits.view(np.int32))),
    )  # fmt: skip
    drafts.accept(packed.ravel(), mask_rows, found, accepted)
    expected = [POISON, 2, 1, 2]
    require(f"{accepted.tolist()} drafts are accepted, expected {expected}", accepted.tolist() == expected)
    last = [drawn[max(count, 0)][row] for row, count in enumerate(expected)]
    require(f"the tokens are {found[:4].tolist()}, expected {last}", found[:4].tolist() == last)
    known = device.slots.last_tokens[order].tolist()
    require(f"the slots' last tokens are {known}", known == last)
    counted = device.slots.counts[3].clone()
    for token in [4, 5, *(drawn[step][1] for step in range(3))]:
        counted[token] -= 1 if token == 4 else 2
    require("the slot's counts differ", not counted.any())


def wide_checks() -> Iterator[Check]:
    for name, dtype in DTYPES.items():
        for vocab_size in (1, 4097, 151_936):
            greedy = sampler.check_greedy
            yield check_of("sampling", f"greedy.{name}.{vocab_size}", greedy, dtype=dtype, vocab_size=vocab_size)
        yield check_of("sampling", f"logprobs.{name}", check_logprobs, dtype=dtype, vocab_size=20_000)
    yield check_of("sampling", "penalties", sampler.check_penalties, vocab_size=5000, num_steps=12)
    yield check_of("sampling", "drafts", check_drafts, vocab_size=20_000)
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
    yield check_of("sampling", "drafts", check_drafts, vocab_size=90)
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
    mine = random_logits(vocab_size, seed=1)
    params: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "top_k": 200, "seed": 77, "repetition_penalty": 1.3}
    alone, crowded = (sampler.SamplingDevice(launcher, vocab_size, 8) for _ in range(2))
    alone.take(sampler.slot_init(0, [4, 5], **params))
    crowded.take(sampler.slot_init(5, [4, 5], **params))
    crowded.take(*(sampler.slot_init(slot, seed=slot, temperature=slot / 2, top_k=slot) for slot in (1, 2, 3)))
    for position in range(2, 6):
        expected = alone.sample(mine[None], [0], position)
        logits = random_logits(4, vocab_size, seed=position)
        logits[position % 4] = mine
        slots = [1, 2, 3]
        slots.insert(position % 4, 5)
        found = crowded.sample(logits, slots, position)[position % 4 : position % 4 + 1]
        require(f"position {position} gives {found}, alone {expected}", found == expected)
