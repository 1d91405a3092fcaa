"""POST /api/generate: a prompt in the model's template, raw, or with the text after the answer."""

from __future__ import annotations

from penstock.frontend.endpoints.answering import answer_chat, answer_completion
from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.ollama.requests import (
    answers_empty,
    picture_parts,
    receive,
    shared_fields,
    style_of,
    think_fields,
    with_own_names,
)
from penstock.frontend.endpoints.prompts import check_token_ids
from penstock.frontend.schemas.chat import ChatBody, ChatMessage, ContentPart, check_chat, content_of
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.schemas.ollama import OllamaGenerateBody, decode_ollama_generate
from penstock.frontend.transport.exchange import Exchange


async def generate(exchange: Exchange, context: EndpointContext) -> None:
    """POST /api/generate. Raises ApiError, ClientGoneError."""
    answer_empty = answers_empty(exchange, is_chat=False)
    received = await receive(
        exchange,
        context,
        decode_ollama_generate,
        "generate",
        lambda body: not (body.prompt or body.suffix),
        answer_empty,
    )
    if received is None:
        return
    body, served = received.body, received.served
    with with_own_names():
        if body.raw or body.suffix:
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
            completion = CompletionBody(
                prompt=body.prompt or "", suffix=body.suffix, logprobs=logprobs, **shared_fields(body)
            )
            await answer_completion(exchange, completion, served, style_of(received, is_chat=False))
            return
        chat = _chat(body, **think_fields(body, served))
        before = body.context or []
        if before:
            check_token_ids("context", before, served.card)
        style = style_of(received, is_chat=False, returns_context=not body.images)  # tokens alone show no picture
        await answer_chat(exchange, chat, served, style, num_body_bytes=received.num_bytes, before=before)


def _chat(body: OllamaGenerateBody, **thinking: bool | str | None) -> ChatBody:
    """Return the same request as a valid chat. Raises ApiError."""
    parts = [*picture_parts(body.images, "images"), ContentPart("text", body.prompt)]
    instructions = [ChatMessage("system", body.system)] if body.system else []
    fields = shared_fields(body) | thinking
    chat = ChatBody(
        messages=[*instructions, ChatMessage("user", content_of(parts))],
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        return_token_ids=True,  # for the context
        **fields,
    )
    check_chat(chat)
    return chat
