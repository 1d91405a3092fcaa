"""POST /score, /v1/score, /classify and /pooling, with vLLM's fields."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Raw

from penstock.frontend.schemas.decoding import decode_body
from penstock.frontend.schemas.generation import ABSENT
from penstock.frontend.schemas.pooling.common import (
    Dimensions,
    EncodingFormat,
    Inputs,
    TruncatedBody,
    check_number,
    listed_inputs,
)
from penstock.frontend.schemas.pooling.rerank import Instruction
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid
from penstock.shm.messages import PooledKind

Texts: TypeAlias = str | Annotated[list[str], Meta(min_length=1)]
_FIRST = ("text_1", "data_1", "queries")
_SECOND = ("text_2", "data_2", "documents", "items")


class ScoreBody(TruncatedBody, kw_only=True):
    """Each pair of names comes from vLLM: text_1 and text_2, data_1 and data_2, queries and documents or items."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    use_activation: bool | None = None
    instruction: Instruction | None = None

    def _given(self, names: tuple[str, ...]) -> str:
        given = [name for name in names if getattr(self, name) is not None]
        if not given:
            raise ApiError(
                ErrorKind.MISSING_FIELD, f"{names[0]}: required, or {' or '.join(names[1:])}", param=names[0]
            )
        if len(given) > 1:
            invalid(given[1], f"cannot be combined with {given[0]}")
        return given[0]

    def second_field(self) -> str:
        return self._given(_SECOND)

    def pairs(self) -> list[tuple[str, str]]:
        """Return one pair per score: a single first text is paired with each second one. Raises ApiError."""
        first_field, second_field = self._given(_FIRST), self.second_field()
        first, second = (_texts(getattr(self, name)) for name in (first_field, second_field))
        check_number(second_field, len(second))
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            invalid(first_field, f"{len(first)} texts and {len(second)} in {second_field}; one, or as many, are needed")
        return list(zip(first, second, strict=True))


class ClassifyBody(TruncatedBody, kw_only=True):
    input: Inputs
    use_activation: bool | None = None
    activation: bool | None = None
    """use_activation by an older name."""
    messages: Raw = ABSENT

    def inputs(self) -> list[str | list[int]]:
        return listed_inputs("input", self.input)

    @property
    def is_activated(self) -> bool:
        return self.use_activation is not False and self.activation is not False


class PoolingBody(ClassifyBody, kw_only=True):
    task: PooledKind | None = None
    """The first of the model's kinds by default."""
    encoding_format: EncodingFormat | None = None
    dimensions: Dimensions | None = None
    normalize: bool | None = None
    embed_dtype: Raw = ABSENT
    endianness: Raw = ABSENT
    softmax: Raw = ABSENT


_score = msgspec.json.Decoder(ScoreBody)
_classify = msgspec.json.Decoder(ClassifyBody)
_pooling = msgspec.json.Decoder(PoolingBody)


def decode_score(data: bytes) -> ScoreBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = decode_body(_score, data)
    body.check_truncation()
    body.pairs()
    return body


def decode_classify(data: bytes) -> ClassifyBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = decode_body(_classify, data)
    body.check_truncation()
    body.inputs()
    return body


def decode_pooling(data: bytes) -> PoolingBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = decode_body(_pooling, data)
    body.check_truncation()
    body.inputs()
    return body


def _texts(given: Texts) -> list[str]:
    return [given] if isinstance(given, str) else list(given)
