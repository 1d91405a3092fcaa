"""POST /v1/embeddings: OpenAI's fields, and vLLM's."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from penstock.frontend.schemas.decoding import decode_body
from penstock.frontend.schemas.generation import ABSENT, ShortText
from penstock.frontend.schemas.pooling.common import Dimensions, EncodingFormat, Inputs, TruncatedBody, listed_inputs


class EmbeddingsBody(TruncatedBody, kw_only=True):
    input: Inputs
    encoding_format: EncodingFormat | None = None
    dimensions: Dimensions | None = None
    prompt_name: ShortText | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    """vLLM's name for normalize."""

    embed_dtype: Raw = ABSENT
    endianness: Raw = ABSENT
    messages: Raw = ABSENT

    def inputs(self) -> list[str | list[int]]:
        return listed_inputs("input", self.input)

    @property
    def is_normalized(self) -> bool:
        return self.normalize is not False and self.use_activation is not False


_embeddings = msgspec.json.Decoder(EmbeddingsBody)


def decode_embeddings(data: bytes) -> EmbeddingsBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = decode_body(_embeddings, data)
    body.check_truncation()
    body.inputs()
    return body
