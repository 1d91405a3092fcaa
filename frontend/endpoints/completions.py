"""POST /v1/chat/completions and POST /v1/completions: from a body to prompts, and from their streams to an answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

from penstock.frontend.formats.base import Identity, StreamUsageOptions, Usage
from penstock.frontend.formats.chat import ChatFormat
from penstock.frontend.formats.completion import CompletionFormat
from penstock.frontend.generation.answer_rules.chat_rules import chat_answer_rules
from penstock.frontend.generation.answer_rules.requested_grammar import requested_grammar
from penstock.frontend.generation.generate import Generation, outcome
from penstock.frontend.generation.request_policy import read_request_policy
from penstock.frontend.generation.submission import AnswerRules, requested_max_tokens, submit
from penstock.frontend.schemas.decoding import decode_chat, decode_completion
from penstock.frontend.telemetry.request_log import RequestLogEntry
from penstock.frontend.text.chat_template import TemplateRefusedError
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.frontend.formats.base import Format
    from penstock.frontend.generation.served_model import ServedModel
    from penstock.frontend.schemas.chat import ChatBody
    from penstock.frontend.schemas.generation import GenerationBody
    from penstock.frontend.transport.exchange import Exchange
    from penstock.shm.client import BackendClient
    from penstock.shm.messages import ModelCard

    MakeFormat = Callable[[Identity, Usage, StreamUsageOptions], Format]

_INLINE_CHARACTERS = 64 << 10
"""Longer chats are rendered in a thread."""


async def chat_completion(exchange: Exchange, data: bytes, served: ServedModel, backend: BackendClient) -> None:
    """Answers one chat request. Raises ApiError, ClientGoneError."""
    await answer_chat(exchange, decode_chat(data), served, backend, "chatcmpl-", ChatFormat, size=len(data))


async def answer_chat(
    exchange: Exchange,
    body: ChatBody,
    served: ServedModel,
    backend: BackendClient,
    id_prefix: str,
    make_format: MakeFormat,
    *,
    size: int,
) -> None:
    """Answers a chat, whatever endpoint's body said it, in that endpoint's format. size is of that body, in bytes.

    Raises ApiError, ClientGoneError.
    """
    async with exchange.attended():
        prompt = await render_chat(body, served, is_long=size > _INLINE_CHARACTERS)
        prompt, guidance = await chat_answer_rules(body, prompt, served)
    await generate(exchange, body, [prompt], guidance, served, backend, id_prefix, make_format)


async def completion(exchange: Exchange, data: bytes, served: ServedModel, backend: BackendClient) -> None:
    """Answers one completion request. Raises ApiError, ClientGoneError."""
    body = decode_completion(data)
    asked = body.prompts()
    texts = [prompt for prompt in asked if isinstance(prompt, str)]
    if texts:
        async with exchange.attended():
            with_special = body.add_special_tokens is not False
            prompts = await _encode(body, "prompt", texts, served, add_special_tokens=with_special)
    else:
        prompts = [prompt for prompt in asked if isinstance(prompt, list)]
        for position, prompt in enumerate(prompts):
            _check_token_ids(f"prompt[{position}]" if body.has_several_prompts() else "prompt", prompt, served.card)
    guidance = AnswerRules(grammar=requested_grammar(body))
    await generate(exchange, body, prompts, guidance, served, backend, "cmpl-", CompletionFormat)


async def render_chat(body: ChatBody, served: ServedModel, *, is_long: bool) -> list[int]:
    """The token ids of a chat by the model's template. Raises ApiError."""
    text = await render_text(body, served, is_long=is_long)
    add_special_tokens = body.add_special_tokens is True  # templates write their own
    return (await _encode(body, "messages", [text], served, add_special_tokens=add_special_tokens))[0]


async def render_text(body: ChatBody, served: ServedModel, *, is_long: bool) -> str:
    """The prompt's text by the model's template. Raises ApiError."""
    template = served.tokenizer.chat_template
    if template is None:
        raise ApiError(
            ErrorKind.TEMPLATE_REFUSED, "this model has no chat template; use /v1/completions", param="messages"
        )
    try:
        return await asyncio.to_thread(template.render, body) if is_long else template.render(body)
    except TemplateRefusedError as error:
        raise ApiError(
            ErrorKind.TEMPLATE_REFUSED, f"messages: the chat template refuses them: {error}", param="messages"
        ) from None


async def _encode(
    body: GenerationBody, field: str, texts: list[str], served: ServedModel, *, add_special_tokens: bool
) -> list[list[int]]:
    limit = served.card.max_context_tokens
    for text in texts if body.truncate_prompt_tokens is None else ():
        least = served.tokenizer.min_num_tokens(text)
        if least > limit:
            message = f"{field}: at least {least} tokens, but the context of this model is {limit} tokens"
            raise ApiError(ErrorKind.CONTEXT_TOO_LONG, message, param=field)
    return await served.tokenizer.encode(texts, add_special_tokens=add_special_tokens)


async def generate(
    exchange: Exchange,
    body: GenerationBody,
    prompts: list[list[int]],
    guidance: AnswerRules,
    served: ServedModel,
    backend: BackendClient,
    id_prefix: str,
    make_format: MakeFormat,
) -> None:
    """Runs the prompts and answers in the endpoint's own format. Raises ApiError, ClientGoneError."""
    terms = read_request_policy(exchange, body)
    card = served.card
    check_model(body.model, card)
    prompts = [_truncated(body, prompt, card) for prompt in prompts]
    response_id = id_prefix + secrets.token_hex(12)
    usage = Usage(prompt_tokens=sum(map(len, prompts)))
    record = RequestLogEntry(
        response_id,
        exchange.received_s,
        http_request_id=exchange.request_id,
        key=exchange.key_name,
        prompt_tokens=usage.prompt_tokens,
    )
    identity = Identity(response_id, int(time.time()), card.model_id, card.fingerprint or None)
    answer = make_format(identity, usage, _streamed_usage(body))
    try:
        choices = await submit(body, terms, prompts, guidance, served, backend)
        exchange.charge(usage.prompt_tokens)
        generation = Generation(exchange, choices, answer, usage, record)
        if body.return_timings or body.timings_per_token:
            usage.timings = lambda: generation.timings().as_dict()
        exchange.watch(generation.cancel)
        if body.stream:
            await generation.answer_stream()
        else:
            await generation.answer_whole(body.n or 1 if body.num_candidates > (body.n or 1) else None)
    except BaseException as error:
        record.finish_reason = outcome(error) if isinstance(error, ApiError) else "cancelled"
        raise
    finally:
        exchange.charge(usage.completion_tokens)
        record.observe(backend.board, time.monotonic())


def _streamed_usage(body: GenerationBody) -> StreamUsageOptions:
    options = body.stream_options
    in_every_chunk = body.timings_per_token is True
    if options is None:
        return StreamUsageOptions(timings_in_every_chunk=in_every_chunk)
    return StreamUsageOptions(options.include_usage is True, options.continuous_usage_stats is True, in_every_chunk)


def _truncated(body: GenerationBody, prompt: list[int], card: ModelCard) -> list[int]:
    """As many of the prompt's tokens as were asked for; -1 is as many as leave room for the answer."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return prompt
    if limit == 0:
        invalid("truncate_prompt_tokens", "must be -1 or at least 1, got 0")
    if limit == -1:
        limit = max(1, card.max_context_tokens - (requested_max_tokens(body)[1] or 1))
    return prompt[:limit] if body.truncation_side == "right" else prompt[-limit:]


def check_model(asked: str | None, card: ModelCard) -> None:
    if asked is not None and asked != card.model_id:
        message = f"model: {shorten(asked)} does not exist; this server has {shorten(card.model_id)}"
        raise ApiError(ErrorKind.UNKNOWN_MODEL, message, param="model")


def _check_token_ids(param: str, token_ids: list[int], card: ModelCard) -> None:
    largest = max(token_ids)
    if largest >= card.vocab_size:
        invalid(param, f"token id {largest} is outside the vocabulary of {card.vocab_size}")
