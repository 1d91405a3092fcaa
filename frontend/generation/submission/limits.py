"""How many tokens a request may generate, which tokens end them, and how large its answer may grow."""

from __future__ import annotations

import msgspec

from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.schemas.decoding import AnsweredBody
from penstock.frontend.schemas.generation import MAX_LOGPROB_CELLS, MAX_PROMPT_LOGPROB_CELLS
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid
from penstock.shm.messages import ModelCard

MAX_STOP_TOKENS = 64
"""The same limit as in `penstock.shm.messages.TextHeader`."""


def read_max_tokens(body: AnsweredBody, prompts: list[list[int]], card: ModelCard) -> list[int]:
    """Return the limit of each prompt's answer: the requested one, or the rest of the context.

    Raises ApiError if a prompt and its answer do not fit in the context, or if the limit is below min_tokens.
    """
    limits = [_max_tokens(body, len(prompt), card.max_context_tokens) for prompt in prompts]
    if body.min_tokens and body.min_tokens > min(limits):
        invalid("min_tokens", f"{body.min_tokens}, but the answer can have at most {min(limits)} tokens")
    return limits


def _max_tokens(body: AnsweredBody, num_prompt_tokens: int, max_context_tokens: int) -> int:
    prompt_field = body.prompt_field
    numbers = {"n_prompt_tokens": num_prompt_tokens, "n_ctx": max_context_tokens}  # llama.cpp's names
    if not num_prompt_tokens:
        invalid(prompt_field, "no tokens; this model needs at least one")
    if num_prompt_tokens >= max_context_tokens:
        message = (
            f"{prompt_field}: {num_prompt_tokens} tokens, but the context of this model is {max_context_tokens} tokens "
            f"and must leave room for an answer"
        )
        raise ApiError(ErrorKind.CONTEXT_TOO_LONG, message, param=prompt_field, numbers=numbers)
    field, requested = body.requested_max_tokens
    if requested is None:
        return max_context_tokens - num_prompt_tokens
    if num_prompt_tokens + requested > max_context_tokens:
        message = (
            f"{field}: {requested} tokens after a prompt of {num_prompt_tokens} make {num_prompt_tokens + requested}, "
            f"but the context of this model is {max_context_tokens} tokens"
        )
        raise ApiError(ErrorKind.CONTEXT_TOO_LONG, message, param=field, numbers=numbers)
    return requested


def limited_by_context(body: AnsweredBody, num_prompt_tokens: int, card: ModelCard) -> AnsweredBody:
    """Return the body with a limit that fits the context after its longest prompt. A prompt that is too long is
    refused later."""
    num_left = card.max_context_tokens - num_prompt_tokens
    field, requested = body.requested_max_tokens
    if num_left < 1 or requested is None or requested <= num_left:
        return body
    return msgspec.structs.replace(body, **{field: num_left})


def check_logprobs(body: AnsweredBody, prompts: list[list[int]], max_tokens: list[int], card: ModelCard) -> None:
    """Check the named tokens, and bound the size of the answer before it is generated. Raises ApiError."""
    _check_logprob_token_ids(body, card)
    if body.prompt_logprobs is not None and body.stream:
        invalid("prompt_logprobs", "not available in a stream; leave stream out")
    prompt_field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    counts = (
        ("logprobs", max_tokens, max(body.num_logprobs, len(body.logprob_token_ids or ())), MAX_LOGPROB_CELLS),
        (prompt_field, map(len, prompts), body.num_prompt_logprobs, MAX_PROMPT_LOGPROB_CELLS),
    )
    for field, num_tokens, width, limit in counts:
        cells = body.num_candidates * sum(num_tokens) * (width + 1)
        if cells > limit:
            invalid(field, f"choices × tokens × ({field} + 1) is {cells}; the limit is {limit}")


def _check_logprob_token_ids(body: AnsweredBody, card: ModelCard) -> None:
    if body.logprob_token_ids and body.num_logprobs < 0:
        invalid("logprob_token_ids", "needs logprobs")
    if body.logprob_token_ids and body.is_prompt_only:
        invalid("logprob_token_ids", "not available with max_tokens 0: they are those of generated tokens")
    for token_id in body.logprob_token_ids or ():
        check_token_id("logprob_token_ids", token_id, card)


def check_token_id(field: str, token_id: int, card: ModelCard) -> None:
    """Raises ApiError for an id outside the vocabulary."""
    if token_id >= card.vocab_size:
        invalid(field, f"token id {token_id} is outside the vocabulary of {card.vocab_size}")


def read_stop_token_ids(body: AnsweredBody, served: ServedModel, *, has_grammar: bool) -> tuple[int, ...]:
    """Return the model's end tokens, unless the request ignores them, and its own. With a grammar nothing but an end
    can follow a complete answer. Raises ApiError."""
    for token_id in body.stop_token_ids or ():
        check_token_id("stop_token_ids", token_id, served.card)
    model_end = () if body.ignore_eos and not has_grammar else served.end_token_ids
    token_ids = tuple(dict.fromkeys((*model_end, *(body.stop_token_ids or ()))))
    if len(token_ids) > MAX_STOP_TOKENS:
        message = f"{len(token_ids)} together with the model's own end tokens; the limit is {MAX_STOP_TOKENS}"
        invalid("stop_token_ids", message)
    return token_ids
