"""Fields that the bodies of embedding, reranking and classification share."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Raw

from penstock.frontend.schemas.completion import check_unmixed
from penstock.frontend.schemas.generation import ABSENT, SchedulingBody, ShortText
from penstock.frontend.transport.errors import ApiError, ErrorKind, empty_text, invalid
from penstock.shm.messages import MAX_CONTEXT_TOKENS, TokenId

MAX_INPUTS = 2048
"""Inputs of one request, as at OpenAI. Larger bodies exceed 2 MiB and a client's patience."""

Inputs: TypeAlias = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
"""A text or a list of token ids, or several."""
Dimensions: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 16)]
EncodingFormat: TypeAlias = Literal["float", "base64"]


class PooledBody(SchedulingBody, kw_only=True):
    """Fields of every body. The scheduling fields are ours; no API has them."""

    model: ShortText | None = None
    user: str | None = None


class TruncatedBody(PooledBody, kw_only=True):
    """vLLM's fields that control an input's tokens."""

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_CONTEXT_TOKENS)] | None = None
    """-1 is the model's limit."""
    truncation_side: Literal["left", "right"] | None = None

    mm_processor_kwargs: Raw = ABSENT
    padding: Raw = ABSENT

    def check_truncation(self) -> None:
        """Raises ApiError."""
        if self.truncate_prompt_tokens == 0:
            invalid("truncate_prompt_tokens", "must be -1 or at least 1, got 0")


def listed_inputs(field: str, inputs: Inputs) -> list[str | list[int]]:
    """Return one entry per input. Raises ApiError if there are too many, one is empty, or they are of two kinds."""
    if isinstance(inputs, str):
        texts: list[str | list[int]] = [inputs]
    else:
        check_unmixed(field, inputs)
        texts = [[item for item in inputs if isinstance(item, int)]] if isinstance(inputs[0], int) else []
        texts = texts or [item for item in inputs if not isinstance(item, int)]
    check_number(field, len(texts))
    if "" in texts:
        name = field if isinstance(inputs, str) else f"{field}[{texts.index('')}]"
        empty_text(name)
    return texts


def has_several(inputs: Inputs) -> bool:
    """Whether it is a list of inputs, even of one."""
    return isinstance(inputs, list) and not isinstance(inputs[0], int)


def check_number(field: str, num_inputs: int) -> None:
    """Raises ApiError if there are too many inputs."""
    if num_inputs > MAX_INPUTS:
        message = f"{field}: at most {MAX_INPUTS} inputs in one request, got {num_inputs}"
        raise ApiError(ErrorKind.TOO_MANY_INPUTS, message, param=field)
