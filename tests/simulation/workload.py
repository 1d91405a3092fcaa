"""Everything that a seed decides in advance: the sizes of the backend, the speed of all parties, and the requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from penstock.backend.forward_pass import SamplingParams
from penstock.shm.messages import Constraints, Finish, Grammar, Sampling
from tests.simulation.models import ChainModel, HashModel, Stream
from tests.simulation.rules import UNSOUND, Rules

if TYPE_CHECKING:
    from random import Random

    from penstock.shm.messages import EventLogprobs
    from tests.simulation.models import Model

_HASH_MODEL_EVERY = 32
_STATE_EVERY = 8
_POOLED_EVERY = 8
_WIDE, _WITH_ADAPTERS, _WITH_QUOTES, _WITH_DRAFTS, _WITH_PICTURES = (1, 6), (2, 6), (1, 7), (0, 2, 4), (4, 7)
"""Worlds by seed modulo 8: many sequences run, requests have adapters, ask for quotes, rows have drafts, or prompts
pictures."""


@dataclass(eq=False, slots=True)
class Ask:
    """One request of one client, resubmitted to the next backend after a restart."""

    number: int
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    salt: bytes
    tenant: bytes
    weight: float
    may_share: bool
    priority: int
    timeout_ms: int
    constraints: Constraints | None
    num_prompt_logprobs: int
    adapter: str
    is_embedded: bool
    """The prompt is submitted as embeddings until the first token is received."""
    expected: list[int]
    """All tokens that it must receive."""
    logprobs: list[EventLogprobs]
    """Log probabilities of the expected tokens, with more top tokens than requested."""
    scores: list[EventLogprobs]
    """Log probabilities of the prompt's tokens but the first, with more top tokens than requested."""
    finish: Finish
    """How it ends if nothing else ends it. FAILED is by its grammar."""
    got: list[int] = field(default_factory=list)
    """Tokens that its frontend has received."""
    ended: Finish | None = None
    submitted_ns: int = 0
    admitted_ns: int = 0
    """`PromptHeader.admitted_ns`: 0 until it is resubmitted."""
    num_lives: int = 0
    vector: list[float] | None = None
    """The vector that a pooled request must receive, instead of tokens."""
    group: int = 0
    """The same number for all inputs of a client's request; 0 if it has one."""
    is_question: bool = False
    """It asks for a quote only."""
    refuses_late: bool = False
    """It is refused if it would be late."""
    spans: tuple[tuple[int, int], ...] = ()
    """(first token, number of tokens) of the pictures in its prompt."""
    engine_error: str = ""
    """The place at which the engine fails on it; see `faults`."""

    def __str__(self) -> str:
        return f"#{self.number}"


@dataclass(slots=True)
class Setup:
    """Everything in a seed's world that does not change."""

    model: Model
    num_pages: int
    num_host_pages: int
    page_size: int
    max_running: int
    max_batch_tokens: int
    capacity: int
    num_plans_ahead: int
    """Passed to the scheduler. If it is less than the capacity, new sequences are soon preempted."""
    num_checkpoints: int | None
    """The pass keeps a state for each slot, and so many checkpoints; None: it keeps no state."""
    runs_ahead: bool
    """The pass gets a step while it computes the previous one, and each step's tokens come late."""
    max_waiting: int
    priority_step_s: float
    grace_s: tuple[float, float, float]
    """start_s, quiet_s and longest_s of the backend's `RestartGrace`."""
    context: int
    credit: int
    num_asks: int
    max_park_steps: int
    rates: dict[str, float]
    device_speed: str
    """Speed of the device compared with the loop: "slow", "even", "fast" or "changing"."""
    prompts: list[list[int]]
    samplings: list[Sampling]
    constraint_choices: list[Constraints]
    """Constraints that requests may have."""
    weights: dict[bytes, float]
    """The tenants. They may share a salt, as clients without keys do."""
    pooled_rate: float = 0.0
    group_rate: float = 0.0
    vector_cache_bytes: int = 0
    adapters: tuple[str, ...] = ()
    """Each backend has most of them, in its own order."""
    quote_rate: float = 0.0
    picture_rate: float = 0.0
    picture_cache_tokens: int = 0
    sees_whole: bool = False
    """The tokens of a picture attend to each other both ways."""
    has_drafts: bool = False
    has_draft_model: bool = False

    @classmethod
    def draw(cls, rng: Random, seed: int) -> Setup:
        vocab_size = rng.choice((11, 23, 60))
        has_window = seed % (2 * _HASH_MODEL_EVERY) == 16
        is_real = has_window or seed % _HASH_MODEL_EVERY == 0
        page_size, num_pages = rng.randint(1, 4), rng.randint(4, 18)
        context = min(num_pages * page_size, 40)
        longest = max(1, min(14, context - 2))
        stem = [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))]
        prompts = [stem, [*stem[: len(stem) // 2 + 1], rng.randrange(vocab_size)]]
        prompts += [[rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(2)]
        samplings = _draw_samplings(rng)
        capacity = rng.randint(0, 4)
        model: Model = HashModel(vocab_size, has_window) if is_real else ChainModel(vocab_size)
        often, seldom = rng.choice((0.1, 0.3)), rng.choice((0.0, 0.01, 0.04))
        return cls(
            model=model,
            num_pages=num_pages,
            num_host_pages=rng.choice((0, 1, 4, 40)) * (not has_window),
            page_size=page_size,
            max_running=rng.randint(1, 6),
            max_batch_tokens=rng.choice((1, 3, 6, 12, 24)),
            capacity=capacity,
            num_plans_ahead=rng.choice((0, capacity)),
            num_checkpoints=(6, 0, 2, 1)[seed // _STATE_EVERY % 4] if seed % _STATE_EVERY == 3 else None,
            runs_ahead=rng.random() < 0.4,
            max_waiting=rng.choice((1, 3, 100, 100, 100)),
            priority_step_s=rng.choice((0.0, 0.0, 3.0)),
            grace_s=rng.choice(((0.0, 0.0, 0.0), (2.0, 1.0, 5.0), (6.0, 3.0, 9.0))),
            context=context,
            credit=rng.choice((1, 2, 8)),
            num_asks=rng.choice((6, 16, 30)),
            max_park_steps=rng.choice((1, 2, 64)),
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
                "engine_error": 0.0 if is_real else rng.choice((0.0, 0.1, 0.3)),
                "bad request": seldom,
                "constrained": rng.choice((0.0, 0.0, 0.3, 0.8)),
                "scored": rng.choice((0.0, 0.0, 0.2)),
                "embedded": rng.choice((0.0, 0.0, 0.2, 0.6)),
                "compile": rng.choice((0.1, 0.5, 1.0)),
                "nap": rng.choice((0.0, 0.3)),
                "slow frontend": rng.choice((0.0, 0.7)),
                "slow wire": rng.choice((0.0, 0.5)),
            },
            device_speed=rng.choice(("slow", "even", "fast", "changing")),
            prompts=prompts,
            samplings=samplings[: rng.randint(1, 4)],
            constraint_choices=[_draw_constraints(rng, vocab_size) for _ in range(rng.randint(1, 3))],
            weights={bytes([number]): rng.choice((0.5, 1.0, 1.0, 4.0)) for number in range(rng.randint(1, 3))},
        )

    def draw_more(self, rng: Random, seed: int) -> None:
        """Some worlds have more sequences, which copy from each other's partial pages, some adapters, some quotes."""
        is_chain = isinstance(self.model, ChainModel)
        if seed % 8 in _WIDE and is_chain:
            self.max_running, self.page_size = rng.randint(6, 12), rng.choice((4, 8, 16, 16))
            self.num_pages = self.max_running * rng.choice((2, 3))
            self.context = min(self.num_pages * self.page_size, 40)
            self.max_batch_tokens = 24
            stem = [rng.randrange(self.model.vocab_size) for _ in range(min(self.page_size, 9) - 1)]
            self.prompts = [
                [*stem[: rng.randint(1, len(stem))], rng.randrange(self.model.vocab_size)] for _ in range(6)
            ]
            if self.page_size == 16:
                self._saturate(rng, stem)
            self.weights = {bytes([number]): 1.0 for number in range(rng.randint(2, 3))}
            self.num_asks = 60
            self.rates |= {"submit": 0.8, "burst": 0.5}
        if seed % 8 in _WITH_ADAPTERS and is_chain:
            self.adapters = ("a", "b", "c")
        if seed % 8 in _WITH_QUOTES:
            self.quote_rate = 0.3
        self.has_drafts = seed % 8 in _WITH_DRAFTS or (seed % _STATE_EVERY == 3 and seed // _STATE_EVERY % 4 != 1)
        self.has_draft_model = seed % 16 == 10 and is_chain
        if self.has_draft_model:  # it is asked while few run and nothing waits
            self.max_running = min(self.max_running, 4)
            self.rates["submit"] *= 0.3
            self.adapters = self.adapters if seed % 32 == 10 else ()

    def draw_picture_sizes(self, rng: Random, seed: int) -> None:
        if seed % 8 in _WITH_PICTURES and isinstance(self.model, ChainModel):
            longest = 1 + max(map(len, self.prompts))
            self.picture_rate, self.sees_whole = 0.7, rng.random() < 0.5
            self.picture_cache_tokens = longest * rng.choice((1, 1, 3))
            if self.sees_whole:
                self.max_batch_tokens = max(self.max_batch_tokens, longest + self.max_running)

    def draw_pictures(self, rng: Random, ask: Ask, like: Ask | None) -> None:
        """Perhaps put pictures in the prompt, such as other requests have."""
        has_none = ask.vector is not None or ask.is_embedded or ask.num_prompt_logprobs >= 0
        if has_none or ask.sampling.presence_penalty or rng.random() >= self.picture_rate:
            return
        size = len(ask.prompt)
        few, half = min(3, size), size // 2
        ask.spans = rng.choice((((0, few),), ((half, size - half),), ((0, half), (half, size - half))[half == 0 :]))
        if like is not None and like.prompt == ask.prompt and rng.random() < 0.8:
            ask.spans = like.spans

    def _saturate(self, rng: Random, stem: list[int]) -> None:
        """Each sequence has one page, and no page is left when all slots are taken: a newcomer gets the page of the
        sequence that it preempts, from which another one may copy. Nothing else frees pages."""
        self.num_pages, self.context, self.num_host_pages = self.max_running, 16, 0
        self.capacity, self.num_plans_ahead, self.max_park_steps = min(self.capacity, 1), 0, 1
        self.prompts = [[*stem, rng.randrange(self.model.vocab_size)] for _ in range(4)]
        quiet = ("cancel", "storm", "frontend death", "restart", "drain", "fault", "engine_error")
        self.rates |= dict.fromkeys(quiet, 0.0) | {"alike": 0.1}

    def draw_adapter(self, rng: Random, like: Ask | None) -> str:
        if like is not None and rng.random() < 0.6:
            return like.adapter
        return rng.choice(("", *self.adapters))

    def draw_ask(self, rng: Random, number: int, like: Ask | None = None, adapter: str = "") -> Ask:
        """A new request with limits and stop tokens of its own; everything else may be as in `like`."""
        prompt = list(rng.choice(self.prompts))
        if rng.random() < 0.3:
            prompt = [*prompt[: self.context - 2], rng.randrange(self.model.vocab_size)]
        sampling, salt, may_share = rng.choice(self.samplings), rng.choice((b"", b"", b"other")), rng.random() < 0.7
        if like is not None and like.finish is not Finish.REJECTED:
            prompt, sampling, salt, may_share = list(like.prompt), like.sampling, like.salt, like.may_share
        constraints = rng.choice(self.constraint_choices) if rng.random() < self.rates["constrained"] else None
        if like is not None and like.finish is not Finish.REJECTED:
            constraints = like.constraints
        max_tokens = rng.choice((1, 5, 10, 16))
        count = max(0, min(max_tokens, self.context - len(prompt)))
        grammar = constraints.grammar if constraints is not None else None
        is_sound = grammar is None or grammar.text not in UNSOUND
        params, stream = params_of(sampling), Stream()
        if is_sound:
            stream = self.model.stream(prompt, params, count, self._rules(constraints, ()), adapter)
        stop_ids = tuple(rng.choice(stream.tokens or [0]) for _ in range(rng.choice((0, 0, 0, 1, 2))))
        if stop_ids and rng.random() < 0.2:
            stop_ids = (rng.randrange(self.model.vocab_size),)
        if is_sound and stop_ids and constraints is not None:
            stream = self.model.stream(prompt, params, count, self._rules(constraints, stop_ids), adapter)
        stops = [index for index, token in enumerate(stream.tokens) if token in stop_ids]
        if stops:
            del stream.tokens[stops[0] + 1 :]
        finish = Finish.STOP if stops else Finish.FAILED if stream.is_broken else Finish.LENGTH
        is_scored = rng.random() < self.rates["scored"]
        # Penalties do not apply to embeddings.
        is_embedded = not sampling.presence_penalty and not is_scored and rng.random() < self.rates["embedded"]
        return Ask(
            number=number,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_ids=stop_ids,
            salt=salt,
            tenant=(tenant := rng.choice(list(self.weights))),
            weight=self.weights[tenant],
            may_share=may_share and not is_embedded,
            priority=rng.randint(-2, 2),
            timeout_ms=rng.choice((0, 0, 0, 1000 * rng.randint(1, 25))),
            constraints=constraints,
            num_prompt_logprobs=rng.choice((0, 2)) if is_scored else -1,
            adapter=adapter,
            is_embedded=is_embedded,
            expected=stream.tokens,
            logprobs=stream.logprobs,
            scores=self.model.score(prompt, adapter) if is_scored else [],
            finish=finish if is_sound else Finish.REJECTED,
        )

    def draw_pooled(self, seed: int) -> None:
        """Some worlds have requests for vectors, half of these a cache for them."""
        self.pooled_rate = 0.5 * (seed % _POOLED_EVERY == 5)
        self.group_rate = 0.2 * (seed % _POOLED_EVERY == 5 and isinstance(self.model, ChainModel))
        self.vector_cache_bytes = 2000 * (seed % (2 * _POOLED_EVERY) == 5)

    def make_pooled(self, ask: Ask) -> None:
        """Ask for the vector of the prompt instead of tokens after it."""
        if isinstance(self.model, ChainModel):
            ask.vector, ask.finish, ask.max_tokens = self.model.vector(ask.prompt, ask.adapter), Finish.STOP, 1
            ask.expected, ask.logprobs, ask.scores, ask.stop_ids = [], [], [], ()
            ask.constraints, ask.num_prompt_logprobs, ask.is_embedded = None, -1, False

    def draw_inputs(self, rng: Random, first_number: int, group: int) -> list[Ask]:
        """The inputs of one client's request for vectors, perhaps equal ones."""
        asks = [self.draw_ask(rng, first_number + place) for place in range(rng.randint(2, 5))]
        for ask in asks:
            self.make_pooled(ask)
            ask.group, ask.salt, ask.tenant, ask.weight = group, asks[0].salt, asks[0].tenant, asks[0].weight
            ask.priority, ask.timeout_ms = asks[0].priority, asks[0].timeout_ms
        return asks

    def _rules(self, constraints: Constraints | None, stop_ids: tuple[int, ...]) -> Rules | None:
        if constraints is None:
            return None
        return Rules(constraints, frozenset(stop_ids), self.model.vocab_size)


def _draw_samplings(rng: Random) -> list[Sampling]:
    hot = rng.choice((5.0, 20.0))
    samplings = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, seed=rng.randrange(9), top_k=3),
        Sampling(temperature=0.0, presence_penalty=1.5),
        Sampling(temperature=hot, seed=7),
        Sampling(temperature=hot, seed=8),
        Sampling(temperature=hot, seed=8, presence_penalty=0.5),
    ]
    samplings += [msgspec.structs.replace(rng.choice(samplings), num_logprobs=rng.choice((0, 1, 3)))]
    rng.shuffle(samplings)
    return samplings


def _draw_constraints(rng: Random, vocab_size: int) -> Constraints:
    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(count))

    match rng.randrange(4):
        case 0:
            return Constraints(min_tokens=rng.randint(1, 8), bad_words=(some(1), some(2)))
        case 1:
            # With few allowed tokens the model is likely to generate the first of these by itself.
            end = some(rng.randint(1, 2))
            return Constraints(
                allowed_token_ids=(*end, *some(3)), thinking_budget_tokens=rng.randint(1, 4), thinking_end=end
            )
        case _:
            text = rng.choice(UNSOUND) if rng.random() < 0.1 else f"{rng.randrange(9)} {rng.choice((3, 9, 99, 99))}"
            few = some(2)
            is_late = rng.random() < 0.3
            return Constraints(
                grammar=Grammar("regex", text),
                grammar_after=few[:1] if is_late else (),
                allowed_token_ids=(*few, *some(vocab_size // 2)) if is_late else (),
                min_tokens=rng.choice((0, 0, 4)),
                bad_words=rng.choice(((), (some(1),))),
            )


def params_of(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        presence_penalty=sampling.presence_penalty,
        seed=sampling.seed,
        num_logprobs=sampling.num_logprobs,
    )
