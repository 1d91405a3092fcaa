"""The coalescer against a dict: which sequence a key finds after others ended, stopped or were replaced."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.backend.engine.coalescer import Coalescer, Presented, ShareKey
from penstock.backend.forward_pass import SamplingParams
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber
from penstock.shm.messages import Constraints

SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.0, seed=2),
]
KEYS = [ShareKey.of(salt, prompt, s) for salt in (b"", b"x") for prompt in (b"1234", b"5678") for s in SAMPLINGS]


FRESH = Presented(1, bytes(4), 1)
"""A request that brings nothing but a prompt of one token."""


def new_sequence() -> Sequence:
    return Sequence(Subscriber(1, 0, 10, frozenset(), 1, 0.0), bytes(4), 1, SamplingParams())


class CoalescerMachine(RuleBasedStateMachine):
    """Uses the coalescer like the engine: a sequence is offered for a key that finds none, and withdrawn at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.coalescer = Coalescer()
        self.offered: dict[ShareKey, Sequence] = {}
        """Key → its latest sequence that has not ended."""
        self.alive: list[Sequence] = []

    @rule(key=st.sampled_from(KEYS))
    def submit(self, key: ShareKey) -> None:
        offered = self.offered.get(key)
        joinable = offered is not None and offered.final_generation != offered.generation
        found = self.coalescer.find(key, FRESH)
        assert found is (offered if joinable else None)
        if found is None:
            sequence = new_sequence()
            self.coalescer.offer(key, sequence, FRESH)
            self.offered[key] = sequence
            self.alive.append(sequence)

    @rule()
    def arrive_alone(self) -> None:
        self.alive.append(new_sequence())

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        sequence.ended = True
        self.alive.remove(sequence)
        self.coalescer.withdraw(sequence)
        self.coalescer.withdraw(sequence)
        self.offered = {key: other for key, other in self.offered.items() if other is not sequence}

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        sequence.stopped_generation = sequence.final_generation = sequence.generation

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def drop_rows(self, data: st.DataObject) -> None:
        """Its mask is late."""
        sequence = data.draw(st.sampled_from(self.alive))
        sequence.stopped_generation = sequence.generation

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.alive)).rewind(0)

    @invariant()
    def it_remembers_only_offered_sequences(self) -> None:
        assert len(self.coalescer) == len(self.offered)

    def teardown(self) -> None:
        for sequence in self.alive:
            self.coalescer.withdraw(sequence)
        assert len(self.coalescer) == 0
        assert all(self.coalescer.find(key, FRESH) is None for key in KEYS)


TestCoalescerMachine = CoalescerMachine.TestCase
TestCoalescerMachine.settings = settings(max_examples=100, stateful_step_count=30)

OTHER = {
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "typical_p": 0.9,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "dry_multiplier": 0.8,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 9,
    "dry_breakers": b"\1\0\0\0\xff\xff\xff\xff",
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "top_n_sigma": 1.0,
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 2.0,
    "logit_bias": ((3, 1.0),),
    "seed": 9,
    "num_logprobs": 3,
    "logprob_token_ids": (3, 1),
}
OF_NO_EFFECT_WHEN_GREEDY = {
    *("top_p", "top_k", "min_p", "typical_p", "seed"),
    *("xtc_probability", "xtc_threshold", "top_n_sigma", "dynatemp_range", "dynatemp_exponent"),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_share_key_contains_every_parameter_that_changes_the_tokens(name: str, temperature: float) -> None:
    """A parameter that is added to SamplingParams must be added here, and so be thought about."""
    sampling = SamplingParams(temperature=temperature)
    other = replace(sampling, **{name: OTHER[name]})
    are_equal = ShareKey.of(b"", b"1234", sampling) == ShareKey.of(b"", b"1234", other)
    assert are_equal == (temperature == 0.0 and name in OF_NO_EFFECT_WHEN_GREEDY)


@given(st.binary(max_size=16), st.binary(max_size=16), st.binary(max_size=8), st.binary(max_size=8))
def test_share_key_separates_salt_and_prompt(salt: bytes, other: bytes, prompt: bytes, another: bytes) -> None:
    keys = [ShareKey.of(s, p, SAMPLINGS[0]) for s, p in ((salt, prompt), (other, another))]
    assert (keys[0] == keys[1]) == ((salt, prompt) == (other, another))


@pytest.mark.parametrize("constraints", [Constraints(min_tokens=2), Constraints(grammar_after=(7,))])
def test_share_key_contains_stop_ids_only_if_constraints_forbid_them(constraints: Constraints) -> None:
    keys = {ShareKey.of(b"", b"1234", SamplingParams(), constraints, stop_ids) for stop_ids in ((1, 2), (2, 1), (3,))}
    assert len(keys) == 2
    assert len({ShareKey.of(b"", b"1234", SamplingParams(), Constraints(), stop_ids) for stop_ids in ((1,), (2,))}) == 1
