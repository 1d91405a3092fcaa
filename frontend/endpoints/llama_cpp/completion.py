"""POST /completion, and what it has in common with /infill."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.frontend.endpoints.answering import AnswerStyle, answer_prompts, prepared_in_time, refuse_if_full
from penstock.frontend.endpoints.chat_translation import renamed, shared_fields
from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.llama_cpp.props import generation_settings
from penstock.frontend.endpoints.prompts import check_length, check_token_ids, truncated
from penstock.frontend.formats.base import Identity, StreamUsageOptions, Usage
from penstock.frontend.formats.llama_cpp import LlamaCppFormat, NativeAnswer
from penstock.frontend.generation.answer_rules.chat_rules import AnswerRules
from penstock.frontend.generation.answer_rules.requested_grammar import requested_grammar
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.submission.submit import PreparedRequest
from penstock.frontend.pictures.placing import ChatPrompt
from penstock.frontend.schemas.chat import picture_part
from penstock.frontend.schemas.completion import (
    MEDIA_MARKER,
    CompletionBody,
    NativeBody,
    NativeCompletionBody,
    PromptObject,
)
from penstock.frontend.schemas.decoding import decode_native_completion
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten
from penstock.frontend.transport.exchange import Exchange

_RENAMED = (
    (re.compile(r"^max_tokens$"), "n_predict"),
    (re.compile(r"^logprobs$"), "n_probs"),
    (re.compile(r"^n$"), "n_cmpl"),
    (re.compile(r"^messages$"), "prompt"),
)
"""These endpoints' names for a completion's fields."""


async def complete(exchange: Exchange, context: EndpointContext) -> None:
    """POST /completion. Raises ApiError, ClientGoneError."""
    body, served, _ = await context.receive_body(exchange, decode_native_completion)
    await answer_native(exchange, body, served, lambda: _encoded(body, served, exchange.tenant))


async def answer_native(
    exchange: Exchange, body: NativeBody, served: ServedModel, encode: Callable[[], Awaitable[list[ChatPrompt]]]
) -> None:
    """Continue prompts, which are encoded unless the backend is full. Raises ApiError, ClientGoneError."""
    completion = _as_completion(body)
    with renamed(_RENAMED):
        refuse_if_full(exchange, completion, served)
        async with prepared_in_time(exchange, completion):
            given, rules = await encode(), AnswerRules(grammar=requested_grammar(completion))
            request = PreparedRequest(completion, [each.token_ids for each in given], rules, given[0].pictures)
            prompts = truncated(request, served.card).prompts
            texts = await asyncio.to_thread(
                lambda: [served.tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
            )
        answer = NativeAnswer(
            settings=generation_settings(served.card, completion),
            prompts=texts,
            prompt_tokens=list(map(len, prompts)),
            num_candidates=completion.num_candidates,
            max_context_tokens=served.card.max_context_tokens,
            returns_tokens=body.return_tokens is True,
            has_timings_per_token=body.timings_per_token is True,
            fields=body.response_fields or [],
        )

        def make_format(identity: Identity, usage: Usage, _: StreamUsageOptions) -> LlamaCppFormat:
            return LlamaCppFormat(identity, usage, answer)

        await answer_prompts(exchange, request, served, AnswerStyle("cmpl-", make_format, stops_at_context=True))


def _as_completion(body: NativeBody) -> CompletionBody:
    limit = body.n_predict
    own: dict[str, Any] = {
        "max_tokens": None if limit is None or limit < 0 else limit,
        "n": body.n_cmpl or body.n,
        "logprobs": body.n_probs or None,
        "return_token_ids": True,  # they are counted
        "return_timings": True,
        "return_progress": body.return_progress,
        "response_format": body.response_format,
    }
    return CompletionBody(prompt="", **shared_fields(body) | own)


async def _with_pictures(
    text: str, data: list[str], body: NativeCompletionBody, served: ServedModel, tenant: bytes
) -> ChatPrompt:
    """Return the prompt of a text with a marker for each picture. Raises ApiError."""
    path, reader = "prompt.multimodal_data", served.pictures
    if reader is None:
        raise ApiError(ErrorKind.WRONG_MODEL, f"{path}: {shorten(served.card.model_id)} takes no pictures", param=path)
    if len(data) != text.count(MEDIA_MARKER):
        invalid(path, f"{len(data)} pictures; prompt.prompt_string has {text.count(MEDIA_MARKER)} {MEDIA_MARKER}")
    parts = [(f"{path}[{index}]", picture_part(f"data:;base64,{each}", "")) for index, each in enumerate(data)]
    pictures = await reader.read(parts, tenant)
    first, *others = text.split(MEDIA_MARKER)
    text = first + "".join(each.result.text + rest for each, rest in zip(pictures, others, strict=True))
    (token_ids,) = await served.tokenizer.encode([text], add_special_tokens=body.add_special_tokens is not False)
    return reader.place(token_ids, pictures)


async def _encoded(body: NativeCompletionBody, served: ServedModel, tenant: bytes) -> list[ChatPrompt]:
    """Return the prompts. A text gets the tokens that begin one only at its prompt's start. Raises ApiError."""
    if isinstance(body.prompt, PromptObject) and (data := body.prompt.multimodal_data):
        check_length("prompt", [body.prompt.prompt_string], served)
        return [await _with_pictures(body.prompt.prompt_string, data, body, served, tenant)]
    prompts = body.prompts()
    first = [prompt[0] for prompt in prompts if prompt and isinstance(prompt[0], str)]
    later = [text for prompt in prompts for text in prompt[1:] if isinstance(text, str)]
    if body.truncate_prompt_tokens is None:
        check_length("prompt", first + later, served)
    begun = iter(await served.tokenizer.encode(first, add_special_tokens=body.add_special_tokens is not False))
    others = iter(await served.tokenizer.encode(later, add_special_tokens=False))
    encoded = []
    for prompt in prompts:
        token_ids: list[int] = []
        for position, segment in enumerate(prompt):
            if isinstance(segment, str):
                token_ids += next(others if position else begun)
            else:
                token_ids.append(segment)
        if token_ids:
            check_token_ids("prompt", token_ids, served.card)
        encoded.append(ChatPrompt(token_ids))
    return encoded
