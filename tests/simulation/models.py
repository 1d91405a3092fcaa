"""Two models whose every token is known beforehand: the simulator's oracles.

`ChainModel` costs microseconds a step; its pass is `ChainPass`. `HashModel` is the fake pass with the real sampler, run
for one sequence alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.backend.forward_pass import SamplingParams, SlotInit, StepBatch, TokenMasks
from penstock.backend.passes.fake import FakePass
from penstock.shm.messages import MAX_LOGPROBS, EventLogprobs
from tests.fake_passes import WindowedFakePass
from tests.simulation.chain_pass import (
    ROOT,
    ChainPass,
    PassSizes,
    SlotState,
    flavour_of,
    make_logprobs,
    make_vector,
    mix,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.forward_pass import EmbeddingRows
    from tests.simulation.rules import Rules

_BYTES_PER_TOKEN = 8
"""Bytes of the fake pass's cache per token."""


@dataclass
class Stream:
    """Tokens and their log probabilities, with the largest number of top tokens that can be requested."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[EventLogprobs] = field(default_factory=list)
    is_broken: bool = False
    """Its rules allowed no token before `count` was reached."""


class Model(Protocol):
    """A model whose output is a function of prompt, sampling parameters and rules."""

    vocab_size: int

    def stream(
        self, prompt: list[int], sampling: SamplingParams, count: int, rules: Rules | None = None, adapter: str = ""
    ) -> Stream:
        """The count tokens after the prompt."""
        ...

    def score(self, prompt: list[int], adapter: str = "") -> list[EventLogprobs]:
        """Log probabilities of the prompt's tokens but the first; the event of each is its index."""
        ...

    def new_pass(self, sizes: PassSizes) -> Any: ...


@dataclass
class ChainModel:
    vocab_size: int

    def stream(
        self, prompt: list[int], sampling: SamplingParams, count: int, rules: Rules | None = None, adapter: str = ""
    ) -> Stream:
        flavour = flavour_of(adapter)
        cell = _cell_after(prompt, flavour)
        slot = SlotState(sampling, prompt, len(prompt))
        stream = Stream()
        while len(stream.tokens) < count:
            allowed = None
            if rules is not None and (allowed := rules.allowed(stream.tokens)) is None:
                stream.is_broken = True
                break
            token = slot.choose(cell, len(prompt) + len(stream.tokens), self.vocab_size, allowed)
            stream.tokens.append(token)
            stream.logprobs.append(make_logprobs(cell, token, self.vocab_size))
            cell = mix(cell ^ flavour, token)
        return stream

    def score(self, prompt: list[int], adapter: str = "") -> list[EventLogprobs]:
        scores, cell = [], ROOT
        for index, (token, following) in enumerate(pairwise(prompt), start=1):
            cell = mix(cell ^ flavour_of(adapter), token)
            scores.append(make_logprobs(cell, following, self.vocab_size, index))
        return scores

    def vector(self, prompt: list[int], adapter: str) -> list[float]:
        """The vector of a pooled request."""
        return make_vector(_cell_after(prompt, flavour_of(adapter)))

    def new_pass(self, sizes: PassSizes) -> ChainPass:
        return ChainPass(self.vocab_size, sizes)


def _cell_after(prompt: list[int], flavour: int) -> int:
    cell = ROOT
    for token in prompt:
        cell = mix(cell ^ flavour, token)
    return cell


class _HashPass(FakePass):
    def __init__(self, vocab_size: int, max_running: int, host_kv_bytes: int, *, runs_ahead: bool) -> None:
        super().__init__(vocab_size, max_running, host_kv_bytes)
        self.spec = replace(self.spec, runs_ahead=runs_ahead)

    def _tokens_of(self, values: EmbeddingRows) -> list[int]:
        return [int(row[0]) for row in values.read()]


class _WindowedHashPass(_HashPass, WindowedFakePass):
    pass


@dataclass
class HashModel:
    """The fake pass with the real sampler, without adapters. It is slow, so few seeds use it."""

    vocab_size: int
    has_window: bool = False

    def stream(
        self, prompt: list[int], sampling: SamplingParams, count: int, rules: Rules | None = None, _adapter: str = ""
    ) -> Stream:
        return self._stream(prompt, sampling, count, rules.allowed if rules is not None else None)

    def score(self, prompt: list[int], _adapter: str = "") -> list[EventLogprobs]:
        forced = self._stream(
            prompt[:1], SamplingParams(temperature=0.0), len(prompt) - 1, lambda done: {prompt[1 + len(done)]}
        )
        return [
            EventLogprobs(index, entry.logprob, entry.rank, entry.top_ids, entry.top_logprobs)
            for index, entry in enumerate(forced.logprobs, start=1)
        ]

    def _stream(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        count: int,
        allowed_after: Callable[[list[int]], set[int] | None] | None,
    ) -> Stream:
        alone = self.new_pass(PassSizes(1, 0, len(prompt) + count + 1, 1, 1 << 16, runs_ahead=False))
        new, context, stream = list(prompt), 0, Stream()
        with_all_logprobs = replace(sampling, num_logprobs=MAX_LOGPROBS)
        inits: tuple[SlotInit, ...] = (SlotInit(0, with_all_logprobs, np.array(prompt, np.int32), len(prompt)),)
        while len(stream.tokens) < count:
            masks = None
            if allowed_after is not None:
                if (allowed := allowed_after(stream.tokens)) is None:
                    stream.is_broken = True
                    break
                masks = _mask_of(allowed, self.vocab_size)
            batch = StepBatch(
                input_ids=np.array(new, np.int32),
                query_starts=np.array([0, len(new)], np.int32),
                context_lens=np.array([context], np.int32),
                page_table=np.zeros((1, 1), np.int32),
                slots=np.zeros(1, np.int32),
                logit_rows=np.zeros(1, np.int32),
                slot_inits=inits,
            )
            output = alone.sample(alone.forward(batch), batch, masks)
            logprobs = output.logprobs
            token = int(output.token_ids[0])
            stream.tokens.append(token)
            if logprobs is not None:
                top = tuple(logprobs.top_ids[0].tolist()), tuple(logprobs.top[0].tolist())
                stream.logprobs.append(EventLogprobs(0, float(logprobs.chosen[0]), int(logprobs.ranks[0]), *top))
            context += len(new)
            new, inits = [token], ()
        return stream

    def new_pass(self, sizes: PassSizes) -> FakePass:
        host_kv_bytes = sizes.num_host_pages * sizes.page_size * _BYTES_PER_TOKEN
        kind = _WindowedHashPass if self.has_window else _HashPass
        forward_pass = kind(self.vocab_size, sizes.max_running, host_kv_bytes, runs_ahead=sizes.runs_ahead)
        forward_pass.create_cache(sizes.num_pages, sizes.page_size, "fp32")
        return forward_pass


def _mask_of(allowed: set[int], vocab_size: int) -> TokenMasks:
    bits = sum(1 << token for token in allowed).to_bytes(-(-vocab_size // 32) * 4, "little")
    return TokenMasks(np.zeros(1, np.int32), np.frombuffer(bits, np.uint32)[None])
