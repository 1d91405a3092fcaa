"""POST /v1/embed and /v2/embed: Cohere's embeddings."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.frontend.schemas.decoding import decode_body
from penstock.frontend.schemas.generation import ABSENT
from penstock.frontend.schemas.pooling.common import Dimensions, PooledBody, check_number
from penstock.frontend.transport.errors import ApiError, ErrorKind, empty_text, invalid
from penstock.shm.messages import MAX_CONTEXT_TOKENS

EmbeddingType: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
InputType: TypeAlias = Literal["search_document", "search_query", "classification", "clustering"]


class TextPart(Struct):
    type: Literal["text"]
    text: str


class MixedInput(Struct):
    """An input in parts. This server takes one text."""

    content: Annotated[list[TextPart], Meta(min_length=1, max_length=1)]


class CohereEmbedBody(PooledBody, kw_only=True):
    texts: Annotated[list[str], Meta(min_length=1)] | None = None
    inputs: Annotated[list[MixedInput], Meta(min_length=1)] | None = None
    """The same texts in /v2's other form."""
    input_type: InputType | None = None
    embedding_types: Annotated[list[EmbeddingType], Meta(min_length=1, max_length=6)] | None = None
    output_dimension: Dimensions | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)] | None = None
    """Longer inputs are truncated to this many tokens."""
    truncate: Literal["NONE", "START", "END"] | None = None
    """The end that an input loses; END by default."""

    images: Raw = ABSENT

    def input_field(self) -> str:
        return "inputs" if self.texts is None else "texts"

    def listed(self) -> list[str]:
        """Return the texts. Raises ApiError if there are none, too many, or one is empty."""
        field = self.input_field()
        if self.texts is not None and self.inputs is not None:
            invalid("inputs", "not together with texts")
        texts = self.texts
        if texts is None:
            if self.inputs is None:
                raise ApiError(ErrorKind.MISSING_FIELD, "texts: required, or inputs", param="texts")
            texts = [each.content[0].text for each in self.inputs]
        check_number(field, len(texts))
        if "" in texts:
            empty_text(f"{field}[{texts.index('')}]")
        return texts


_embed = msgspec.json.Decoder(CohereEmbedBody)


def decode_cohere_embed(data: bytes) -> CohereEmbedBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = decode_body(_embed, data)
    body.listed()
    return body
