"""From a decoded body to submitted streams: what is sampled, what ends it, what is wanted of it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from penstock.frontend.generation.answer_rules.requested_grammar import grammar_field
from penstock.frontend.generation.choice import Choice, OutputOptions
from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.schemas.generation import MAX_LOGPROB_CELLS, MAX_PROMPT_LOGPROB_CELLS, GenerationBody
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, retry_later
from penstock.shm.client import BackendUnavailable, GenerationRequest, Overloaded
from penstock.shm.messages import Constraints, Grammar, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.frontend.generation.choice import OutputParser
    from penstock.frontend.generation.request_policy import RequestPolicy
    from penstock.frontend.generation.served_model import ServedModel
    from penstock.shm.client import BackendClient
    from penstock.shm.messages import ModelCard

_MASK_63 = (1 << 63) - 1
MAX_STOP_TOKENS = 64
"""As in `penstock.shm.messages.Submit`."""
_GOLDEN = 0x9E3779B97F4A7C15
_MAX_BAD_WORD_TOKENS = 16
_MAX_BAD_WORDS = 64
"""As in `penstock.shm.messages.Constraints`."""


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What an endpoint found the answer must look like, and how it is to be read."""

    grammar: Grammar | None = None
    grammar_after: tuple[int, ...] = ()
    thinking_budget_tokens: int = 0
    thinking_end: tuple[int, ...] = ()
    make_parser: Callable[[], OutputParser] | None = None
    may_end_answer: bool = False
    """What the parser reads may end the answer: a call, where one is enough."""
    kept_token_ids: frozenset[int] = frozenset()
    """As in `penstock.frontend.generation.choice.OutputOptions`."""


async def submit(
    body: GenerationBody,
    terms: RequestPolicy,
    prompts: list[list[int]],
    guidance: AnswerRules,
    served: ServedModel,
    backend: BackendClient,
) -> list[Choice]:
    """One stream per prompt and candidate, candidates of a prompt together. All of them, or none. Raises ApiError."""
    card = served.card
    max_tokens = [_max_tokens(body, prompt, card) for prompt in prompts]
    _check_min_tokens(body, max_tokens)
    _check_logprobs(body, prompts, max_tokens)
    sampling = _sampling(body, card)
    stop_token_ids = _stop_token_ids(body, card)
    constraints = await _constraints(body, guidance, served)
    wanted = _wanted(body, guidance)
    prompt_logprobs = _num_prompt_logprobs(body)
    texts = _prompt_texts(body)
    # With a seed that was drawn here the tokens are this request's alone.
    is_determined = sampling.temperature == 0.0 or body.seed is not None
    # A text in which nothing ends it here, and that nobody reads as it comes.
    batch_delivery = not (body.stream or wanted.stop_strings or guidance.may_end_answer)
    choices: list[Choice] = []
    try:
        for prompt_index, prompt in enumerate(prompts):
            for candidate in range(body.num_candidates):
                request = GenerationRequest(
                    prompt,
                    max_tokens[prompt_index],
                    _for_candidate(sampling, candidate),
                    stop_token_ids,
                    salt=terms.salt,
                    may_share=terms.may_join and is_determined,
                    priority=terms.priority,
                    deadline_s=terms.deadline_s,
                    constraints=constraints,
                    num_prompt_logprobs=prompt_logprobs,
                    batch_delivery=batch_delivery,
                )
                stream = backend.submit(request)
                text = texts[prompt_index] if texts else None
                choices.append(Choice(len(choices), prompt_index, prompt, stream, served.tokenizer, wanted, text))
    except (BackendUnavailable, Overloaded) as error:
        for choice in choices:
            choice.stream.cancel()
        if isinstance(error, Overloaded):
            raise retry_later(ErrorKind.OVERLOADED, "too many requests are waiting", error.retry_after_s) from None
        raise retry_later(ErrorKind.UNAVAILABLE, "the model is not available at the moment", 1) from None
    return choices


def _wanted(body: GenerationBody, guidance: AnswerRules) -> OutputOptions:
    completion = body if isinstance(body, CompletionBody) else None
    return OutputOptions(
        stop_strings=body.stop_strings(),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        keeps_stop=body.include_stop_str_in_output is True,
        min_tokens=body.min_tokens or 0,
        skips_special_tokens=body.skip_special_tokens is not False,
        token_ids=body.return_token_ids is True,
        logprobs=body.num_logprobs >= 0,
        echo=completion is not None and completion.echo is True,
        prompt_logprobs=body.prompt_logprobs is not None,
        ranks_choices=body.num_candidates > (body.n or 1),
        grammar_field=None if guidance.grammar is None else grammar_field(body) or "tools",
        no_output=_is_prompt_alone(body),
        make_parser=guidance.make_parser,
        kept_token_ids=guidance.kept_token_ids,
    )


async def _constraints(body: GenerationBody, guidance: AnswerRules, served: ServedModel) -> Constraints | None:
    """None where nothing is constrained, so that equal requests look equal."""
    for token_id in body.allowed_token_ids or ():
        if token_id >= served.card.vocab_size:
            invalid("allowed_token_ids", f"token id {token_id} is outside the vocabulary of {served.card.vocab_size}")
    constraints = Constraints(
        grammar=guidance.grammar,
        grammar_after=guidance.grammar_after,
        allowed_token_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
        bad_words=await _bad_words(body, served),
        min_tokens=body.min_tokens or 0,
        thinking_budget_tokens=guidance.thinking_budget_tokens,
        thinking_end=guidance.thinking_end,
    )
    return None if constraints == Constraints() else constraints


async def _bad_words(body: GenerationBody, served: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens as it stands at the beginning of a text and behind a space, where those differ."""
    words = body.bad_words or []
    spelled = [form for word in words for form in (word, f" {word.lstrip(' ')}")]
    runs = await served.tokenizer.encode(spelled, add_special_tokens=False) if spelled else []
    for position, run in enumerate(runs):
        if len(run) > _MAX_BAD_WORD_TOKENS:
            invalid(f"bad_words[{position // 2}]", f"{len(run)} tokens; the limit is {_MAX_BAD_WORD_TOKENS}")
    distinct = tuple(sorted({tuple(run) for run in runs if run}))
    if len(distinct) > _MAX_BAD_WORDS:
        invalid("bad_words", f"{len(distinct)} runs of tokens; the limit is {_MAX_BAD_WORDS}")
    return distinct


def _num_prompt_logprobs(body: GenerationBody) -> int:
    wanted = -1 if body.prompt_logprobs is None else body.prompt_logprobs
    if isinstance(body, CompletionBody) and body.echo:
        wanted = max(wanted, body.num_logprobs)
    return wanted


def _is_prompt_alone(body: GenerationBody) -> bool:
    return isinstance(body, CompletionBody) and body.max_tokens == 0


def _prompt_texts(body: GenerationBody) -> list[str] | None:
    """What to echo, where the client gave the prompts as texts and all of them counts."""
    if not isinstance(body, CompletionBody) or not body.echo or body.truncate_prompt_tokens is not None:
        return None
    texts = [prompt for prompt in body.prompts() if isinstance(prompt, str)]
    return texts or None


def _check_min_tokens(body: GenerationBody, max_tokens: list[int]) -> None:
    if body.min_tokens and body.min_tokens > min(max_tokens):
        invalid("min_tokens", f"{body.min_tokens}, but there is room for {min(max_tokens)} tokens only")


def _check_logprobs(body: GenerationBody, prompts: list[list[int]], max_tokens: list[int]) -> None:
    """An answer's size is bounded before it is made."""
    if body.prompt_logprobs is not None and body.stream:
        invalid("prompt_logprobs", "not told in a stream; leave stream out")
    of_prompt = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    counts = (
        ("logprobs", max_tokens, body.num_logprobs, MAX_LOGPROB_CELLS),
        (of_prompt, map(len, prompts), _num_prompt_logprobs(body), MAX_PROMPT_LOGPROB_CELLS),
    )
    for field, num_tokens, width, limit in counts:
        cells = body.num_candidates * sum(num_tokens) * (width + 1)
        if cells > limit:
            invalid(field, f"choices × tokens × ({field} + 1) is {cells}; the limit is {limit}")


def requested_max_tokens(body: GenerationBody) -> tuple[str, int | None]:
    """The field that says it, and what it says."""
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None:
            return "max_completion_tokens", body.max_completion_tokens
        return "max_tokens", body.max_tokens
    if isinstance(body, CompletionBody):
        return "max_tokens", max(1, body.max_tokens) if body.max_tokens is not None else None
    raise TypeError(f"{type(body).__name__} has no length of its own")


def _max_tokens(body: GenerationBody, prompt: list[int], card: ModelCard) -> int:
    """What was asked, or the rest of the context. Raises ApiError where prompt and answer do not fit."""
    limit = card.max_context_tokens
    field, asked = requested_max_tokens(body)
    of_prompt = "messages" if isinstance(body, ChatBody) else "prompt"
    if not prompt:
        invalid(of_prompt, "no tokens; this model needs at least one")
    if len(prompt) >= limit:
        message = f"{of_prompt}: {len(prompt)} tokens, but the context of this model is {limit} tokens"
        raise ApiError(ErrorKind.CONTEXT_TOO_LONG, f"{message} and must leave room for an answer", param=of_prompt)
    if asked is None:
        return limit - len(prompt)
    if len(prompt) + asked > limit:
        message = (
            f"{field}: {asked} tokens after a prompt of {len(prompt)} make {len(prompt) + asked}, "
            f"but the context of this model is {limit} tokens"
        )
        raise ApiError(ErrorKind.CONTEXT_TOO_LONG, message, param=field)
    return asked


def _stop_token_ids(body: GenerationBody, card: ModelCard) -> tuple[int, ...]:
    ends = () if body.ignore_eos else card.eos_token_ids
    token_ids = tuple(dict.fromkeys((*ends, *(body.stop_token_ids or ()))))
    if len(token_ids) > MAX_STOP_TOKENS:
        invalid("stop_token_ids", f"with the model's own {len(token_ids)}; the limit is {MAX_STOP_TOKENS}")
    return token_ids


def _sampling(body: GenerationBody, card: ModelCard) -> Sampling:
    """The request's parameters over the model's defaults. What greedy decoding does not look at is set to one value,
    so that requests which differ only there are the same to the backend."""
    default = card.default_sampling
    for token_id in body.logit_bias or ():
        if token_id >= card.vocab_size:
            invalid("logit_bias", f"token id {token_id} is outside the vocabulary of {card.vocab_size}")
    temperature = default.temperature if body.temperature is None else body.temperature
    is_greedy = temperature == 0.0
    presence_penalty, frequency_penalty = _penalties(body, default)
    return Sampling(
        temperature=temperature,
        top_p=1.0 if is_greedy else _given(body.top_p, default.top_p),
        top_k=0 if is_greedy else max(0, _given(body.top_k, default.top_k)),
        min_p=0.0 if is_greedy else _given(body.min_p, default.min_p),
        typical_p=1.0 if is_greedy else _given(body.typical_p, default.typical_p),
        repetition_penalty=_given(body.repetition_penalty, default.repetition_penalty),
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=default.logit_bias if body.logit_bias is None else tuple(sorted(body.logit_bias.items())),
        seed=0 if is_greedy else _seed(body.seed),
        num_logprobs=_num_logprobs(body),
    )


def _penalties(body: GenerationBody, default: Sampling) -> tuple[float, float]:
    """For what has been generated. The backend scores a prompt by generating it, and could not tell them apart."""
    presence = _given(body.presence_penalty, default.presence_penalty)
    frequency = _given(body.frequency_penalty, default.frequency_penalty)
    if _num_prompt_logprobs(body) < 0:
        return presence, frequency
    if _is_prompt_alone(body):
        return 0.0, 0.0
    for field, penalty in (("presence_penalty", presence), ("frequency_penalty", frequency)):
        if penalty:
            told = "prompt_logprobs" if body.prompt_logprobs is not None else "echo and logprobs"
            invalid(field, f"cannot be combined with {told}, got {penalty:g}")
    return presence, frequency


_Number = TypeVar("_Number", int, float)


def _given(asked: _Number | None, default: _Number) -> _Number:
    return default if asked is None else asked


def _seed(asked: int | None) -> int:
    return secrets.randbits(63) if asked is None else asked & _MASK_63


def _num_logprobs(body: GenerationBody) -> int:
    """Choosing the best of several needs their tokens' own."""
    chooses = body.num_candidates > (body.n or 1)
    return max(body.num_logprobs, 0 if chooses else -1)


def _for_candidate(sampling: Sampling, candidate: int) -> Sampling:
    """Candidate 0 has the request's own seed; the others one that follows from it. Greedy choices are all the same."""
    if candidate == 0 or sampling.temperature == 0.0:
        return sampling
    # splitmix64: consecutive inputs give unrelated outputs
    mixed = (sampling.seed + candidate * _GOLDEN) & ((1 << 64) - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return msgspec.structs.replace(sampling, seed=(mixed ^ (mixed >> 31)) & _MASK_63)
