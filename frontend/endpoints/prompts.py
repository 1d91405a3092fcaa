"""From a decoded body to the token ids of its prompts."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.submission.submit import PreparedRequest
from penstock.frontend.parsing.syntax.fill_in import FillInTokens
from penstock.frontend.pictures.placing import ChatPrompt, picture_parts
from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.schemas.decoding import AnsweredBody
from penstock.frontend.text.chat_template import TemplateRefusedError, TooMuchWorkError
from penstock.frontend.text.render_budget import INLINE
from penstock.frontend.text.spellings import MarkedText
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten
from penstock.shm.messages import ModelCard

PIECE_TOKENS = 1 << 16
"""Token ids that one call of C code may handle: it holds the interpreter's lock throughout. Longer lists are split."""
_ONE = "☺"
"""A text that no tokenizer joins with what follows."""


async def render_chat(body: ChatBody, served: ServedModel, tenant: bytes, *, is_long: bool) -> ChatPrompt:
    """Return the tokens of a chat by the model's template, and its pictures. A long one is rendered in a thread. Raises
    ApiError."""
    parts, reader = picture_parts(body), served.pictures
    if parts and reader is None:
        path = parts[0][0]
        message = f"{path}: {shorten(served.card.model_id)} takes no pictures; choose a model that does, or send text"
        raise ApiError(ErrorKind.WRONG_MODEL, message, param=path)
    prompt = await render_text(body, served, is_long=is_long)
    pictures = []
    if parts and reader is not None:
        reader.check_count(prompt.text, parts)
        pictures = await reader.read(parts, tenant)
        prompt = reader.expand(prompt, pictures)
    add_special = body.add_special_tokens is True  # templates write their own
    (token_ids,) = await _encode(
        body, "messages", [prompt.text], served, add_special_tokens=add_special, mark=prompt.mark
    )
    return ChatPrompt(token_ids) if reader is None or not parts else reader.place(token_ids, pictures)


async def render_text(body: ChatBody, served: ServedModel, *, is_long: bool) -> MarkedText:
    """Return the prompt's text by the model's template. Raises ApiError.

    A long one is rendered in a thread of the template's own, and one that turns out to take long.
    """
    template, spellings = served.tokenizer.chat_template, served.spellings
    if template is None:
        raise ApiError(
            ErrorKind.TEMPLATE_REFUSED,
            "this model has no chat template; use /v1/completions, or start the server with --chat-template FILE",
            param="messages",
        )
    if served.syntax.writer is not None:
        body = served.syntax.writer.written(body)
    try:
        if not is_long:
            with contextlib.suppress(TooMuchWorkError):
                return template.render_marked(body, spellings, INLINE)
        return await asyncio.get_running_loop().run_in_executor(
            template.thread, template.render_marked, body, spellings
        )
    except TemplateRefusedError as error:
        message = f"messages: the model's chat template refuses them: {error}"
        raise ApiError(ErrorKind.TEMPLATE_REFUSED, message, param="messages") from None


async def encode_prompts(body: CompletionBody, served: ServedModel) -> list[list[int]]:
    """Return the token ids of a completion's prompts, given as texts or as token ids. Raises ApiError."""
    given = body.prompts()
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    with_special = body.add_special_tokens is not False
    if texts and not body.suffix:
        return await _encode(body, "prompt", texts, served, add_special_tokens=with_special)
    prompts = [prompt for prompt in given if isinstance(prompt, list)]

    def check() -> None:
        for position, prompt in enumerate(prompts):
            check_token_ids(f"prompt[{position}]" if body.has_several_prompts() else "prompt", prompt, served.card)

    await asyncio.to_thread(check) if sum(map(len, prompts)) > PIECE_TOKENS else check()
    if body.suffix:
        _, tokens = fill_in_model(served, "suffix")
        check_length("prompt", [*texts, body.suffix], served)
        prompts += await served.tokenizer.encode_as_text(texts, tokens.spellings)
        return await fill_in_prompts(prompts, body.suffix, served, tokens, with_special=with_special)
    return prompts


def fill_in_model(served: ServedModel, field: str) -> tuple[ServedModel, FillInTokens]:
    """Return the model whose answers end where what is filled in ends, and its tokens for that. Raises ApiError."""
    tokens = served.syntax.fill_in
    if tokens is None:
        message = f"{field}: {shorten(served.card.model_id)} has no tokens for filling in, such as <|fim_prefix|>"
        raise ApiError(ErrorKind.UNSUPPORTED_FIELD, message, param=field)
    ends = (token_id for token_id in tokens.ends if token_id not in served.end_token_ids)
    return replace(served, turn_end_ids=(*served.turn_end_ids, *ends)), tokens


async def fill_in_prompts(
    prefixes: list[list[int]], suffix: str, served: ServedModel, tokens: FillInTokens, *, with_special: bool = True
) -> list[list[int]]:
    """Return the prompts that ask for the text between each prefix and the suffix. Raises ApiError."""
    tokenizer = served.tokenizer
    one, begun, bare = await tokenizer.encode_as_text([_ONE, f"{_ONE}{suffix}", suffix], tokens.spellings)
    # SentencePiece puts a space before each text, but the suffix continues a line.
    has_space = bool(one) and tokenizer.token_bytes(one[0]).startswith(b" ") and begun[: len(one)] == one
    after = begun[len(one) :] if has_space else bare
    (whole,) = await tokenizer.encode([_ONE], add_special_tokens=with_special)
    begin = whole[: whole.index(one[0])] if one else whole
    return [[*begin, *tokens.around(prefix, after)] for prefix in prefixes]


def check_length(field: str, texts: list[str], served: ServedModel) -> None:
    """Refuse texts by their length alone, before they are encoded. Raises ApiError."""
    limit = served.card.max_context_tokens
    least = max(map(served.tokenizer.min_num_tokens, texts), default=0)
    if least > limit:
        message = f"{field}: at least {least} tokens, but the context of this model is {limit} tokens"
        raise ApiError(ErrorKind.CONTEXT_TOO_LONG, message, param=field)


async def _encode(
    body: AnsweredBody,
    field: str,
    texts: list[str],
    served: ServedModel,
    *,
    add_special_tokens: bool,
    mark: str = "",
) -> list[list[int]]:
    if body.truncate_prompt_tokens is None:
        check_length(field, texts, served)
    return await served.tokenizer.encode(texts, add_special_tokens=add_special_tokens, mark=mark)


def truncated(request: PreparedRequest, card: ModelCard) -> PreparedRequest:
    """Cut the prompts to truncate_prompt_tokens; -1 keeps as many as leave space for the answer. Raises ApiError."""
    prompts = [_truncated(request.body, prompt, card) for prompt in request.prompts]
    if request.pictures and prompts != request.prompts:
        invalid("truncate_prompt_tokens", "would cut a prompt with pictures, which cannot be cut")
    return replace(request, prompts=prompts)


def _truncated(body: AnsweredBody, prompt: list[int], card: ModelCard) -> list[int]:
    limit = body.truncate_prompt_tokens
    if limit is None:
        return prompt
    if limit == 0:
        invalid("truncate_prompt_tokens", "must be -1 or at least 1, got 0")
    if limit == -1:
        limit = max(1, card.max_context_tokens - (body.requested_max_tokens[1] or 1))
    return prompt[:limit] if body.truncation_side == "right" else prompt[-limit:]


def check_token_ids(param: str, token_ids: list[int], card: ModelCard) -> None:
    """Raises ApiError. Callable from any thread."""
    # In pieces: one call of C code over a million tokens would hold the interpreter's lock throughout.
    for start in range(0, len(token_ids), PIECE_TOKENS):
        largest = max(token_ids[start : start + PIECE_TOKENS])
        if largest >= card.vocab_size:
            invalid(param, f"token id {largest} is outside the vocabulary of {card.vocab_size}")
