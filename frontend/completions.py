"""POST /v1/chat/completions and POST /v1/completions: from a decoded body to submitted streams and an answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from frontend.chat_template import TemplateRefusedError
from frontend.errors import ApiError, ErrorKind, invalid, retry_later, shorten
from frontend.formats import ChatFormat, CompletionFormat, Identity
from frontend.generation import Choice, Generation, outcome
from frontend.request_log import RequestRecord
from frontend.schemas import ChatBody, GenerationBody, decode_chat, decode_completion
from frontend.stop_strings import StopMatcher
from frontend.terms import read_terms
from shm.client import BackendUnavailable, GenerationRequest, Overloaded
from shm.wire import Sampling

if TYPE_CHECKING:
    from frontend.exchange import Exchange
    from frontend.model import ServedModel
    from frontend.terms import Terms
    from shm.client import BackendClient
    from shm.wire import ModelCard

_INLINE_BYTES = 64 << 10
"""Longer chats are rendered in a thread."""
_MASK_63 = (1 << 63) - 1
MAX_STOP_TOKENS = 64
"""As in `shm.wire.Submit`."""
_GOLDEN = 0x9E3779B97F4A7C15


async def chat_completion(exchange: Exchange, data: bytes, served: ServedModel, backend: BackendClient) -> None:
    """Answers one chat request. Raises ApiError, ClientGoneError."""
    body = decode_chat(data)
    terms = read_terms(exchange, body)
    _check_model(body.model, served.card)
    template = served.tokenizer.chat_template
    if template is None:
        raise ApiError(
            ErrorKind.TEMPLATE_REFUSED, "this model has no chat template; use /v1/completions", param="messages"
        )
    try:
        if len(data) > _INLINE_BYTES:
            text = await asyncio.to_thread(template.render, body.messages)
        else:
            text = template.render(body.messages)
    except TemplateRefusedError as error:
        raise ApiError(
            ErrorKind.TEMPLATE_REFUSED, f"messages: the chat template refuses them: {error}", param="messages"
        ) from None
    prompts = await _encode("messages", [text], served, add_special_tokens=False)
    await _generate(exchange, body, terms, prompts, served, backend)


async def completion(exchange: Exchange, data: bytes, served: ServedModel, backend: BackendClient) -> None:
    """Answers one completion request. Raises ApiError, ClientGoneError."""
    body = decode_completion(data)
    terms = read_terms(exchange, body)
    _check_model(body.model, served.card)
    asked = body.prompts()
    texts = [prompt for prompt in asked if isinstance(prompt, str)]
    if texts:
        prompts = await _encode("prompt", texts, served, add_special_tokens=True)
    else:
        prompts = [prompt for prompt in asked if isinstance(prompt, list)]
        for position, prompt in enumerate(prompts):
            _check_token_ids(f"prompt[{position}]" if body.has_several_prompts() else "prompt", prompt, served.card)
    await _generate(exchange, body, terms, prompts, served, backend)


async def _encode(field: str, texts: list[str], served: ServedModel, *, add_special_tokens: bool) -> list[list[int]]:
    limit = served.card.max_context_tokens
    for text in texts:
        least = served.tokenizer.least_tokens(text)
        if least > limit:
            message = f"{field}: at least {least} tokens, but the context of this model is {limit} tokens"
            raise ApiError(ErrorKind.CONTEXT_TOO_LONG, message, param=field)
    return await served.tokenizer.encode(texts, add_special_tokens=add_special_tokens)


async def _generate(
    exchange: Exchange,
    body: GenerationBody,
    terms: Terms,
    prompts: list[list[int]],
    served: ServedModel,
    backend: BackendClient,
) -> None:
    card = served.card
    is_chat = isinstance(body, ChatBody)
    response_id = ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12)
    record = RequestRecord(
        response_id, exchange.received_s, http_request_id=exchange.request_id, prompt_tokens=sum(map(len, prompts))
    )
    include_usage = body.stream_options is not None and body.stream_options.include_usage is True
    identity = Identity(response_id, int(time.time()), card.model_id, card.fingerprint or None)
    answer = (ChatFormat if is_chat else CompletionFormat)(identity, include_usage=include_usage)
    try:
        max_tokens = [_max_tokens(body, prompt, card) for prompt in prompts]
        choices = _submit(body, terms, prompts, max_tokens, served, backend)
        generation = Generation(exchange, choices, answer, record)
        exchange.watch(generation.cancel)
        if body.stream:
            await generation.answer_stream(include_usage=include_usage)
        else:
            await generation.answer_whole()
    except BaseException as error:
        record.finish_reason = outcome(error) if isinstance(error, ApiError) else "cancelled"
        raise
    finally:
        record.write(time.monotonic())


def _submit(
    body: GenerationBody,
    terms: Terms,
    prompts: list[list[int]],
    max_tokens: list[int],
    served: ServedModel,
    backend: BackendClient,
) -> list[Choice]:
    """One stream per prompt and choice, choices of a prompt together. All of them, or none."""
    card = served.card
    sampling = _sampling(body, card)
    stop_token_ids = _stop_token_ids(body, card)
    stop_strings = body.stop_strings()
    num_choices = body.n or 1
    # With a seed that was drawn here the tokens are this request's alone.
    is_determined = sampling.temperature == 0.0 or body.seed is not None
    choices: list[Choice] = []
    try:
        for prompt_index, prompt in enumerate(prompts):
            for choice_index in range(num_choices):
                request = GenerationRequest(
                    prompt,
                    max_tokens[prompt_index],
                    _for_choice(sampling, choice_index),
                    stop_token_ids,
                    salt=terms.salt,
                    may_share=terms.may_join and is_determined,
                    priority=terms.priority,
                    deadline_s=terms.deadline_s,
                )
                detokenizer, stops = served.tokenizer.detokenizer(), StopMatcher(stop_strings)
                choices.append(Choice(len(choices), prompt_index, backend.submit(request), detokenizer, stops))
    except (BackendUnavailable, Overloaded) as error:
        for choice in choices:
            choice.stream.cancel()
        if isinstance(error, Overloaded):
            raise retry_later(ErrorKind.OVERLOADED, "too many requests are waiting", error.retry_after_s) from None
        raise retry_later(ErrorKind.UNAVAILABLE, "the model is not available at the moment", 1) from None
    return choices


def _check_model(asked: str | None, card: ModelCard) -> None:
    if asked is not None and asked != card.model_id:
        message = f"model: {shorten(asked)} does not exist; this server has {shorten(card.model_id)}"
        raise ApiError(ErrorKind.UNKNOWN_MODEL, message, param="model")


def _check_token_ids(param: str, token_ids: list[int], card: ModelCard) -> None:
    largest = max(token_ids)
    if largest >= card.vocab_size:
        invalid(param, f"token id {largest} is outside the vocabulary of {card.vocab_size}")


def _max_tokens(body: GenerationBody, prompt: list[int], card: ModelCard) -> int:
    """What was asked, or the rest of the context. Raises ApiError where prompt and answer do not fit."""
    limit = card.max_context_tokens
    field, asked = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        field, asked = "max_completion_tokens", body.max_completion_tokens
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
    return Sampling(
        temperature=temperature,
        top_p=1.0 if is_greedy else _given(body.top_p, default.top_p),
        top_k=0 if is_greedy else max(0, _given(body.top_k, default.top_k)),
        min_p=0.0 if is_greedy else _given(body.min_p, default.min_p),
        repetition_penalty=_given(body.repetition_penalty, default.repetition_penalty),
        presence_penalty=_given(body.presence_penalty, default.presence_penalty),
        frequency_penalty=_given(body.frequency_penalty, default.frequency_penalty),
        logit_bias=default.logit_bias if body.logit_bias is None else tuple(sorted(body.logit_bias.items())),
        seed=0 if is_greedy else _seed(body.seed),
    )


_Number = TypeVar("_Number", int, float)


def _given(asked: _Number | None, default: _Number) -> _Number:
    return default if asked is None else asked


def _seed(asked: int | None) -> int:
    return secrets.randbits(63) if asked is None else asked & _MASK_63


def _for_choice(sampling: Sampling, choice_index: int) -> Sampling:
    """Choice 0 has the request's own seed; the others one that follows from it. Greedy choices are all the same."""
    if choice_index == 0 or sampling.temperature == 0.0:
        return sampling
    # splitmix64: consecutive inputs give unrelated outputs
    mixed = (sampling.seed + choice_index * _GOLDEN) & ((1 << 64) - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return msgspec.structs.replace(sampling, seed=(mixed ^ (mixed >> 31)) & _MASK_63)
