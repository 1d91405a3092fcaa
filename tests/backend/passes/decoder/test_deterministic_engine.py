"""Through the whole engine: a request's tokens and log probabilities are the same bits in any batch, and when it is
chunked, preempted, coalesced or starts from cached pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder import cpu_pass as forward_pass
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.shm.messages import Sampling
from tests.backend.harness import Bench, Received
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.checkpoints import make_checkpoint
from tests.temporary import make_shared_directory

SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, num_logprobs=3),
    "seeded": Sampling(temperature=1.3, top_p=0.95, seed=77, num_logprobs=0),
}
NUM_TOKENS = 12
OPTIONS = PassOptions(max_running=8, max_batch_tokens=64, deterministic=True)

MakeBench = Callable[..., Bench]
Token = tuple[int, float, int, tuple[int, ...], tuple[float, ...]]
"""Token id, log probability and rank; ids and log probabilities of the likeliest tokens."""


@cache
def checkpoint(head_dim: int) -> Path:
    return make_checkpoint("llama3", make_shared_directory(), dtype=torch.bfloat16, head_dim=head_dim)


def load_on_cpu() -> CpuDecoderPass:
    return CpuDecoderPass.load(checkpoint(head_dim=32), OPTIONS)


def load_on_emulator() -> EmulatedCudaPass:
    """Load in fp32, in which products of one row and of several differ in bits on a CPU."""
    return EmulatedCudaPass.load(checkpoint(head_dim=64), replace(OPTIONS, dtype="fp32"))


IMPLEMENTATIONS = ("native bf16", "native q8_0", "torch bf16", "cuda bf16", "cuda q8_0")


@pytest.fixture(params=IMPLEMENTATIONS)
def make_bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBench]:
    kind, kv_dtype = request.param.split()
    load: Callable[[], Any] = load_on_emulator if kind == "cuda" else load_on_cpu
    if kind == "torch":
        monkeypatch.setattr(forward_pass, "load_kernels", lambda _: None)
    elif kind == "native" and forward_pass.load_kernels() is None:
        pytest.skip("this machine has no native kernels")
    benches: list[Bench] = []

    def make(**settings: Any) -> Bench:
        decoder = load()
        monkeypatch.setattr(decoder, "create_cache", partial(create_cache, decoder.create_cache, kv_dtype))
        defaults = {"max_batch_tokens": 64, "num_pages": 128, "page_size": 16, "vocab_size": 256}
        benches.append(Bench(forward_pass=decoder, **(defaults | settings)))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()
        bench.forward_pass.close()


def create_cache(create: Callable[..., None], kv_dtype: str, num_pages: int, page_size: int, _of_bench: str) -> None:
    create(num_pages, page_size, kv_dtype)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()  # type: ignore[no-any-return]


PROMPT = prompt(41, seed=0)


def submit_all(bench: Bench, first_id: int = 0, **options: Any) -> None:
    for request_id, sampling in enumerate(SAMPLINGS.values(), first_id):
        bench.submit(PROMPT, NUM_TOKENS, request_id=request_id, sampling=sampling, **options)


def tokens(bench: Bench, first_id: int = 0) -> list[list[Token]]:
    return [tokens_of(bench.received(first_id + i)) for i in range(len(SAMPLINGS))]


def tokens_of(received: Received) -> list[Token]:
    return [
        (token_id, entry.logprob, entry.rank, entry.top_ids, entry.top_logprobs)
        for token_id, entry in zip(received.token_ids, received.logprobs, strict=True)
        if entry is not None
    ]


@pytest.fixture
def tokens_alone(
    request: pytest.FixtureRequest, make_bench: MakeBench, known_tokens: dict[str, list[list[Token]]]
) -> list[list[Token]]:
    """Tokens of each sampling in an engine that runs nothing else."""
    implementation = request.node.callspec.params["make_bench"]
    if implementation not in known_tokens:
        known_tokens[implementation] = []
        for sampling in SAMPLINGS.values():
            bench = make_bench()
            bench.submit(PROMPT, NUM_TOKENS, sampling=sampling)
            bench.run_dry()
            known_tokens[implementation].append(tokens_of(bench.received()))
    assert [len(each) for each in known_tokens[implementation]] == [NUM_TOKENS] * len(SAMPLINGS)
    return known_tokens[implementation]


@pytest.fixture(scope="module")
def known_tokens() -> dict[str, list[list[Token]]]:
    """Results of `tokens_alone`, by implementation."""
    return {}


def add_other_requests(bench: Bench, lengths: tuple[int, ...] = (1, 5, 33, 60, 16, 17)) -> None:
    for index, length in enumerate(lengths):
        sampling = Sampling(temperature=1.0, seed=index)
        bench.submit(prompt(length, seed=index + 1), 3 + 2 * index, request_id=100 + index, sampling=sampling)


STEPS = {"bf16": ((7, 0), (64, 3)), "q8_0": ((1, 3), (64, 0))}
"""Tokens of a step and steps launched ahead, by cache: each kind of kernels runs them all."""


@pytest.mark.parametrize(
    ("make_bench", "max_batch_tokens", "capacity"),
    [
        (name, *steps)
        for name in IMPLEMENTATIONS
        for steps in (sum(STEPS.values(), ()) if name == "torch bf16" else STEPS[name.split()[1]])
    ],
    indirect=["make_bench"],
)
def test_tokens_are_the_same_in_any_batch_and_chunks(
    max_batch_tokens: int, capacity: int, make_bench: MakeBench, tokens_alone: list[list[Token]]
) -> None:
    bench = make_bench(max_batch_tokens=max_batch_tokens, capacity=capacity)
    add_other_requests(bench, *[(1, 17)] if max_batch_tokens == 1 else [])
    bench.turn()
    submit_all(bench)
    bench.run_dry()
    assert tokens(bench) == tokens_alone


def test_tokens_are_the_same_after_preemption(make_bench: MakeBench, tokens_alone: list[list[Token]]) -> None:
    bench = make_bench(num_pages=9)
    bench.submit(prompt(40, seed=9), 60, request_id=50)
    bench.turn()
    submit_all(bench)
    bench.run_dry()
    assert bench.board.preemptions > 0
    assert tokens(bench) == tokens_alone


def test_coalesced_requests_have_the_same_tokens(make_bench: MakeBench, tokens_alone: list[list[Token]]) -> None:
    bench = make_bench()
    add_other_requests(bench)
    submit_all(bench, may_share=True)
    for _ in range(9):
        bench.turn()
    submit_all(bench, first_id=10, may_share=True)
    bench.run_dry()
    assert bench.board.requests_coalesced == len(SAMPLINGS)
    assert tokens(bench) == tokens(bench, first_id=10) == tokens_alone


def test_tokens_are_the_same_after_a_prefix_hit(make_bench: MakeBench, tokens_alone: list[list[Token]]) -> None:
    bench = make_bench()
    add_other_requests(bench)
    bench.submit(PROMPT[:35], 3, request_id=50)
    bench.run_dry()
    submit_all(bench)
    bench.run_dry()
    started = bench.received().started
    assert started is not None
    assert started.cached_tokens == 35  # three of them in a copied page
    assert tokens(bench) == tokens_alone
