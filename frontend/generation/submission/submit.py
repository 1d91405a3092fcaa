"""Starts the token streams of one request: its planned use, its constraints, and the messages to the backend."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.frontend.generation.answer_rules.chat_rules import AnswerRules
from penstock.frontend.generation.choices.choice import Choice, ChoicePrompt
from penstock.frontend.generation.choices.output_options import OutputOptions, read_output_options
from penstock.frontend.generation.failures import backend_unavailable, overloaded
from penstock.frontend.generation.lingering import terms_of_choice
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.request_policy import RequestPolicy
from penstock.frontend.generation.submission.limits import (
    check_logprobs,
    check_token_id,
    read_max_tokens,
    read_stop_token_ids,
)
from penstock.frontend.generation.submission.sampling import (
    for_candidate,
    is_deterministic,
    read_breakers,
    read_logit_bias,
    read_sampling,
)
from penstock.frontend.pictures.placing import PlacedPicture, sent_pictures
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.schemas.decoding import AnsweredBody
from penstock.frontend.schemas.generation import GenerationBody
from penstock.frontend.transport.errors import invalid
from penstock.frontend.transport.exchange import PlannedUse, UsageClaim
from penstock.shm.client import BackendUnavailable, GenerationRequest, Linger, Overloaded, QuoteTerms
from penstock.shm.messages import MAX_CONTEXT_TOKENS, Constraints

ASSUMED_ANSWER_TOKENS = 1024
"""Tokens reserved for each choice if the request does not limit its answer. Further tokens count as they come."""


def planned_use(body: AnsweredBody, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> PlannedUse:
    """max_tokens contains the limit of each prompt's answer."""
    field, requested = body.requested_max_tokens
    is_stated = requested is not None
    limits = max_tokens if is_stated else [min(limit, ASSUMED_ANSWER_TOKENS) for limit in max_tokens]
    return PlannedUse(
        num_sequences=len(prompts) * body.num_candidates,
        sequences_field=_sequences_field(body),
        prompt_tokens=sum(map(len, prompts)),
        answer_tokens=body.num_candidates * sum(limits),
        tokens_field=field if is_stated else body.prompt_field,
        is_stated=is_stated,
    )


def _sequences_field(body: AnsweredBody) -> str:
    if body.num_candidates == 1:
        return body.prompt_field
    is_ranked = isinstance(body, CompletionBody) and body.best_of == body.num_candidates
    return "best_of" if is_ranked else "n"


_MAX_BAD_WORD_TOKENS = 16
_MAX_BAD_WORDS = 64
"""The same limits as in `penstock.shm.messages.Constraints`."""


async def read_constraints(body: GenerationBody, rules: AnswerRules, served: ServedModel) -> Constraints | None:
    """Return the constraints; None if there are none, so that equal requests are equal messages.

    Raises ApiError.
    """
    for token_id in body.allowed_token_ids or ():
        check_token_id("allowed_token_ids", token_id, served.card)
    ignores_end = body.ignore_eos and rules.grammar is not None
    constraints = Constraints(
        grammar=rules.grammar,
        grammar_after=rules.grammar_after,
        grammar_ends=served.turn_end_ids if rules.grammar is not None else (),
        allowed_token_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
        bad_words=await _bad_words(body, served),
        min_tokens=MAX_CONTEXT_TOKENS if ignores_end else body.min_tokens or 0,
        thinking_budget_tokens=rules.thinking_budget_tokens,
        thinking_end=rules.thinking_end,
    )
    return None if constraints == Constraints() else constraints


async def _bad_words(body: GenerationBody, served: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word at the start of a text and after a space; without duplicates."""
    words = body.bad_words or []
    spellings = [spelling for word in words for spelling in (word, f" {word.lstrip(' ')}")]
    runs = await served.tokenizer.encode(spellings, add_special_tokens=False) if spellings else []
    for position, run in enumerate(runs):
        if len(run) > _MAX_BAD_WORD_TOKENS:
            invalid(f"bad_words[{position // 2}]", f"{len(run)} tokens; the limit is {_MAX_BAD_WORD_TOKENS}")
    distinct = tuple(sorted({tuple(run) for run in runs if run}))
    if len(distinct) > _MAX_BAD_WORDS:
        invalid("bad_words", f"{len(distinct)} token sequences; the limit is {_MAX_BAD_WORDS}")
    return distinct


_groups = itertools.count(1)
"""A number per request, for `GenerationRequest.group`."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A decoded request whose prompts are token ids."""

    body: AnsweredBody
    prompts: list[list[int]]
    rules: AnswerRules
    pictures: tuple[PlacedPicture, ...] = ()
    """Of the only prompt."""

    @property
    def reports_progress(self) -> bool:
        """The stream reports how much of the prompt is computed."""
        return self.body.return_progress is True and self.body.stream is True


async def generation_requests(
    request: PreparedRequest, policy: RequestPolicy, served: ServedModel
) -> tuple[list[ChoicePrompt], list[GenerationRequest], OutputOptions]:
    """Return the prompts, the request of each one's first candidate, and the output options. Raises ApiError."""
    body, rules = request.body, request.rules
    max_tokens = read_max_tokens(body, request.prompts, served.card)
    check_logprobs(body, request.prompts, max_tokens, served.card)
    biases, breakers = await read_logit_bias(body, served), await read_breakers(body, served)
    sampling = read_sampling(body, served.card, biases, breakers)
    stop_token_ids = read_stop_token_ids(body, served, has_grammar=rules.grammar is not None)
    constraints = await read_constraints(body, rules, served)
    options = read_output_options(body, rules)
    may_share = is_deterministic(body, served.card)
    # Tokens may come in batches if no text can end the answer here, and no client reads it while it is generated.
    batch_delivery = not (body.stream or options.stop_strings or rules.text_may_end_answer)
    adapter = None if body.model is None else served.card.adapter_named(body.model)
    group = next(_groups)
    if request.pictures and body.num_prompt_logprobs >= 0:
        invalid("prompt_logprobs", "not available in a chat with pictures")
    prompts = _choice_prompts(request, max_tokens)
    sent = [sent_pictures(prompt.token_ids, request.pictures) for prompt in prompts]
    requests = [
        GenerationRequest(
            token_ids,
            prompt.max_tokens,
            sampling,
            stop_token_ids,
            salt=policy.salt,
            tenant=policy.tenant,
            weight=policy.weight,
            may_share=policy.may_join and may_share,
            priority=policy.priority,
            deadline_s=policy.deadline_s,
            constraints=constraints,
            num_prompt_logprobs=body.num_prompt_logprobs,
            batch_delivery=batch_delivery,
            group=group,
            pictures=pictures,
            pixels=pixels,
            adapter="" if adapter is None else adapter.adapter_id,
        )
        for prompt, (token_ids, pictures, pixels) in zip(prompts, sent, strict=True)
    ]
    return prompts, requests, options


async def submit(
    request: PreparedRequest,
    policy: RequestPolicy,
    served: ServedModel,
    claim: UsageClaim | None = None,
    linger: Linger | None = None,
) -> list[Choice]:
    """Start one stream per prompt and candidate, the candidates of a prompt together.

    The claim reserves what they may use. linger is for the first choice of an answer that lingers. Raises ApiError;
    then no stream is left running.
    """
    body, backend = request.body, served.backend
    prompts, requests, options = await generation_requests(request, policy, served)
    if claim is not None:
        claim.reserve(planned_use(body, request.prompts, [prompt.max_tokens for prompt in prompts]))
    choices: list[Choice] = []
    terms = quote_terms(request, requests) if policy.refuses_late else None
    try:
        for prompt, of_prompt in zip(prompts, requests, strict=True):
            for candidate in range(body.num_candidates):
                sampling = for_candidate(of_prompt.sampling, candidate)
                refuse_late = None if choices else terms  # the first choice stands for all
                terms_to_linger = terms_of_choice(linger, len(choices))
                # A resumed stream has no progress of the prompt left, so its events would differ.
                reports = request.reports_progress and linger is None and not choices
                own = replace(of_prompt, sampling=sampling, refuse_late=refuse_late, linger=terms_to_linger)
                stream = backend.submit(replace(own, reports_progress=reports))
                choices.append(Choice(len(choices), prompt, stream, served.tokenizer, options))
            await asyncio.sleep(0)  # many prompts must not hold the event loop
    except BaseException as error:
        for choice in choices:
            choice.stream.cancel()
        if not isinstance(error, BackendUnavailable | Overloaded):
            raise
        if isinstance(error, Overloaded):
            raise overloaded(error.retry_after_s, error.limit) from None
        raise backend_unavailable(backend.retry_after_s) from None
    return choices


def quote_terms(request: PreparedRequest, requests: Sequence[GenerationRequest]) -> QuoteTerms:
    """Return the terms that the first of the requests carries for all choices. Equal ones share a sequence."""
    first = requests[0]
    num_alike = 1 if first.may_share and first.sampling.temperature == 0.0 else request.body.num_candidates
    num_tokens = [len(prompt) for prompt in request.prompts]
    return QuoteTerms(num_alike * len(requests), sum(num_tokens[1:]))


def _choice_prompts(request: PreparedRequest, max_tokens: list[int]) -> list[ChoicePrompt]:
    texts: Sequence[str | None] = _echoed_texts(request.body) or [None] * len(request.prompts)
    return [
        ChoicePrompt(index, token_ids, text, limit)
        for index, (token_ids, text, limit) in enumerate(zip(request.prompts, texts, max_tokens, strict=True))
    ]


def _echoed_texts(body: AnsweredBody) -> list[str] | None:
    """Return the texts to echo, if the client sent the prompts as texts and they are not truncated."""
    if not isinstance(body, CompletionBody) or not body.echo or body.truncate_prompt_tokens is not None:
        return None
    return [prompt for prompt in body.prompts() if isinstance(prompt, str)] or None
