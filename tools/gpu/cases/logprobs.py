"""Log probabilities of sampled, likeliest and named tokens, checked against the host's and torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backend.passes.cuda.step.device_sampler import DeviceSampler, LogprobBuffers, SlotArrays
from penstock.backend.passes.cuda.step.step_results import MAX_NAMED_LOGPROBS
from penstock.backend.sampling.logprobs import token_logprobs
from penstock.tools.gpu.cases.comparing import require, require_close
from penstock.tools.gpu.cases.sampler import CPU, POISON, random_logits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from penstock.backend.passes.cuda.device.launcher import Launcher


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
    sampler = DeviceSampler(launcher, slots, logits.dtype)
    given, places = torch.tensor(tokens, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32)
    sampler.logprobs(logits, given, places, out, padded, num_likeliest)
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
    expected = token_logprobs(logits.float().numpy(), np.array(tokens, np.int32), np.array(rows), 4, named)
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
        values = torch.from_numpy(expected.top[place, :width])
        require_close("the reported log probabilities", out.top[place, :width].exp(), values.exp(), 0, 2e-5)
