"""What a seed decides beforehand: the sizes of the backend, the pace of all parties, and what is asked of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.forward_pass import SamplingParams
from shm.wire import Finish, Sampling
from tests.simulation.models import ChainModel, HashModel

if TYPE_CHECKING:
    from random import Random

    from tests.simulation.models import Model

_HASH_MODEL_EVERY = 32


@dataclass(eq=False, slots=True)
class Ask:
    """One request of one client, over all the backends that it lives to see."""

    number: int
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    salt: bytes
    may_share: bool
    priority: int
    timeout_ms: int
    expected: list[int]
    """All the tokens that it is to get, and..."""
    finish: Finish
    """...how it ends when nothing else ends it."""
    got: list[int] = field(default_factory=list)
    """What its frontend has been told."""
    ended: Finish | None = None
    num_lives: int = 0
    curse: str = ""
    """Where the engine breaks down on it, see `faults`."""

    def __str__(self) -> str:
        return f"#{self.number}"


@dataclass(slots=True)
class Setup:
    """Everything about a seed's world that does not change."""

    model: Model
    num_pages: int
    page_size: int
    max_running: int
    max_batch_tokens: int
    capacity: int
    max_waiting: int
    priority_step_s: float
    context: int
    credit: int
    num_asks: int
    patience_steps: int
    rates: dict[str, float]
    pace: str
    """How the device's pace compares with the loop's: "slow", "even", "fast" or "changing"."""
    prompts: list[list[int]]
    flavours: list[Sampling]

    @classmethod
    def draw(cls, rng: Random, seed: int) -> Setup:
        vocab_size = rng.choice((11, 23, 60))
        is_real = seed % _HASH_MODEL_EVERY == 0
        page_size, num_pages = rng.randint(1, 4), rng.randint(4, 18)
        context = min(num_pages * page_size, 40)
        longest = max(1, min(14, context - 2))
        stem = [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))]
        prompts = [stem, [*stem[: len(stem) // 2 + 1], rng.randrange(vocab_size)]]
        prompts += [[rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(2)]
        hot = rng.choice((5.0, 20.0))
        flavours = [
            Sampling(temperature=0.0),
            Sampling(temperature=0.0, seed=rng.randrange(9), top_k=3),
            Sampling(temperature=0.0, presence_penalty=1.5),
            Sampling(temperature=hot, seed=7),
            Sampling(temperature=hot, seed=8),
            Sampling(temperature=hot, seed=8, presence_penalty=0.5),
        ]
        rng.shuffle(flavours)
        often, seldom = rng.choice((0.1, 0.3)), rng.choice((0.0, 0.01, 0.04))
        return cls(
            model=HashModel(vocab_size) if is_real else ChainModel(vocab_size),
            num_pages=num_pages,
            page_size=page_size,
            max_running=rng.randint(1, 6),
            max_batch_tokens=rng.choice((1, 3, 6, 12, 24)),
            capacity=rng.randint(0, 4),
            max_waiting=rng.choice((1, 3, 100, 100, 100)),
            priority_step_s=rng.choice((0.0, 0.0, 3.0)),
            context=context,
            credit=rng.choice((1, 2, 8)),
            num_asks=rng.choice((6, 16, 30)),
            patience_steps=rng.choice((1, 2, 64)),
            rates={
                "submit": rng.choice((0.2, 0.4, 0.8)),
                "alike": rng.choice((0.1, 0.8)),
                "burst": rng.choice((0.0, 0.3)),
                "cancel": rng.choice((0.0, often)),
                "storm": seldom,
                "frontend death": seldom,
                "restart": rng.choice((0.0, 0.03, 0.06)),
                "drain": rng.choice((0.0, 0.0, 0.0, 0.03)),
                "fault": 0.0 if is_real else rng.choice((0.0, 0.0, 0.03, 0.1)),
                "curse": 0.0 if is_real else rng.choice((0.0, 0.0, 0.1)),
                "bad request": seldom,
                "nap": rng.choice((0.0, 0.3)),
                "slow frontend": rng.choice((0.0, 0.7)),
                "slow wire": rng.choice((0.0, 0.5)),
            },
            pace=rng.choice(("slow", "even", "fast", "changing")),
            prompts=prompts,
            flavours=flavours[: rng.randint(1, 4)],
        )

    def draw_ask(self, rng: Random, number: int, like: Ask | None = None) -> Ask:
        """With its own limits and ends in any case; all else may be as in another ask."""
        prompt = list(rng.choice(self.prompts))
        if rng.random() < 0.3:
            prompt = [*prompt[: self.context - 2], rng.randrange(self.model.vocab_size)]
        sampling, salt, may_share = rng.choice(self.flavours), rng.choice((b"", b"", b"other")), rng.random() < 0.7
        if like is not None and like.finish is not Finish.REJECTED:
            prompt, sampling, salt, may_share = list(like.prompt), like.sampling, like.salt, like.may_share
        max_tokens = rng.choice((1, 5, 10, 16))
        count = max(0, min(max_tokens, self.context - len(prompt)))
        expected = self.model.stream(prompt, params_of(sampling), count)
        stop_ids = tuple(rng.choice(expected or [0]) for _ in range(rng.choice((0, 0, 0, 1, 2))))
        if stop_ids and rng.random() < 0.2:
            stop_ids = (rng.randrange(self.model.vocab_size),)
        stops = [index for index, token in enumerate(expected) if token in stop_ids]
        if stops:
            del expected[stops[0] + 1 :]
        return Ask(
            number=number,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_ids=stop_ids,
            salt=salt,
            may_share=may_share,
            priority=rng.randint(-2, 2),
            timeout_ms=rng.choice((0, 0, 0, 1000 * rng.randint(1, 25))),
            expected=expected,
            finish=Finish.STOP if stops else Finish.LENGTH,
        )


def params_of(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        presence_penalty=sampling.presence_penalty,
        seed=sampling.seed,
    )
