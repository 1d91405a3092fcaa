"""How tokens are drawn: the request's parameters over the model's defaults."""

from __future__ import annotations

import re
import secrets
from typing import Any, TypeVar

import msgspec

from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.schemas.decoding import AnsweredBody
from penstock.frontend.schemas.generation import MAX_BIASES
from penstock.frontend.transport.errors import invalid
from penstock.shm.messages import MAX_BREAKER_BYTES, ModelCard, Sampling

_NUMBER = re.compile(r"-?\d+", re.ASCII)
_FORBIDDEN = -100.0
_BREAKERS = ('"', "*", ":", "\n")
"""llama.cpp's."""
_DRY = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n")
_XTC = ("xtc_probability", "xtc_threshold")
_SIGMA = ("top_n_sigma",)
_DYNATEMP = ("dynatemp_range", "dynatemp_exponent")
_MASK_63 = (1 << 63) - 1
_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

_Number = TypeVar("_Number", int, float)


async def read_logit_bias(body: AnsweredBody, served: ServedModel) -> tuple[tuple[int, float], ...]:
    """Return the bias of each token. A text that is not a number biases each of its tokens. Raises ApiError."""
    given = body.logit_bias
    if given is None:
        return served.card.default_sampling.logit_bias
    pairs = list(given.items()) if isinstance(given, dict) else given
    keys = [int(key) if isinstance(key, str) and _NUMBER.fullmatch(key) else key for key, _ in pairs]
    texts = [key for key in keys if isinstance(key, str)]
    encoded = iter(await served.tokenizer.encode(texts, add_special_tokens=False) if texts else [])
    biases: dict[int, float] = {}
    for key, (_, bias) in zip(keys, pairs, strict=True):
        token_ids = next(encoded) if isinstance(key, str) else [key]
        biases.update(dict.fromkeys(token_ids, _FORBIDDEN if bias is False else float(bias)))
    for token_id in biases:
        if not 0 <= token_id < served.card.vocab_size:
            invalid("logit_bias", f"token id {token_id} is outside the vocabulary of {served.card.vocab_size}")
    if len(biases) > MAX_BIASES:
        invalid("logit_bias", f"{len(biases)} tokens; the limit is {MAX_BIASES}")
    return tuple(sorted(biases.items()))


async def read_breakers(body: AnsweredBody, served: ServedModel) -> bytes:
    """Return the tokens of DRY's breakers; empty without DRY. Raises ApiError."""
    if not _has_dry(body, served.card.default_sampling):
        return b""
    texts = _BREAKERS if body.dry_sequence_breakers is None else tuple(sorted(set(body.dry_sequence_breakers)))
    found = await served.tokenizer.breaker_tokens(texts)
    if len(found) > MAX_BREAKER_BYTES:
        limit = MAX_BREAKER_BYTES // 4
        invalid("dry_sequence_breakers", f"more than the limit of {limit} ids of tokens contain them or begin them")
    return found


def _has_dry(body: AnsweredBody, default: Sampling) -> bool:
    window = _given(body.dry_penalty_last_n, default.dry_penalty_last_n)
    return _given(body.dry_multiplier, default.dry_multiplier) > 0 and window != 0


def read_sampling(
    body: AnsweredBody, card: ModelCard, logit_bias: tuple[tuple[int, float], ...] = (), breakers: bytes = b""
) -> Sampling:
    """Return the sampling parameters.

    Greedy decoding ignores some parameters. They get a fixed value, so that the backend can coalesce requests that
    differ only in them.
    """
    default = card.default_sampling
    temperature = _given(body.temperature, default.temperature)
    is_greedy = temperature == 0.0
    named = tuple(dict.fromkeys(body.logprob_token_ids or ()))
    return Sampling(
        temperature=temperature,
        top_p=1.0 if is_greedy else _given(body.top_p, default.top_p),
        top_k=0 if is_greedy else max(0, _given(body.top_k, default.top_k)),
        min_p=0.0 if is_greedy else _given(body.min_p, default.min_p),
        typical_p=1.0 if is_greedy else _given(body.typical_p, default.typical_p),
        repetition_penalty=_given(body.repetition_penalty, default.repetition_penalty),
        presence_penalty=_given(body.presence_penalty, default.presence_penalty),
        frequency_penalty=_given(body.frequency_penalty, default.frequency_penalty),
        logit_bias=logit_bias,
        **_llama_cpp_settings(body, default, is_greedy=is_greedy),
        dry_breakers=breakers,
        seed=0 if is_greedy else _seed(body.seed),
        # Ranking candidates needs the log probabilities of their tokens.
        num_logprobs=0 if named else max(body.num_logprobs, 0 if body.ranks_candidates else -1),
        logprob_token_ids=named,
    )


def _llama_cpp_settings(body: AnsweredBody, default: Sampling, *, is_greedy: bool) -> dict[str, Any]:
    """The settings of DRY, XTC, top-n-sigma and dynamic temperature that have an effect."""
    groups = {
        _DRY: _has_dry(body, default),
        _XTC: not is_greedy and _given(body.xtc_probability, default.xtc_probability) > 0,
        _SIGMA: not is_greedy and _given(body.top_n_sigma, default.top_n_sigma) > 0,
        _DYNATEMP: not is_greedy and _given(body.dynatemp_range, default.dynatemp_range) > 0,
    }
    names = [name for group, is_on in groups.items() if is_on for name in group]
    return {name: _given(getattr(body, name), getattr(default, name)) for name in names}


def is_deterministic(body: AnsweredBody, card: ModelCard) -> bool:
    """Whether an equal request has the same tokens.

    A request without a seed gets a random one, so it cannot share its sequence.
    """
    return body.seed is not None or _given(body.temperature, card.default_sampling.temperature) == 0.0


def for_candidate(sampling: Sampling, candidate: int) -> Sampling:
    """Give each candidate its own seed. Candidate 0 keeps the request's; greedy candidates are all the same."""
    if candidate == 0 or sampling.temperature == 0.0:
        return sampling
    # splitmix64: consecutive inputs give unrelated outputs.
    mixed = (sampling.seed + candidate * _GOLDEN) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return msgspec.structs.replace(sampling, seed=(mixed ^ (mixed >> 31)) & _MASK_63)


def _given(requested: _Number | None, default: _Number) -> _Number:
    return default if requested is None else requested


def _seed(requested: int | None) -> int:
    return secrets.randbits(63) if requested is None else requested & _MASK_63
