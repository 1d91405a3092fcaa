"""POST /v1/rerank, /v2/rerank and /rerank: Cohere's fields, Jina's and vLLM's, which are almost the same."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.frontend.schemas.decoding import decode_body
from penstock.frontend.schemas.generation import ABSENT
from penstock.frontend.schemas.pooling.common import TruncatedBody, check_number
from penstock.frontend.transport.errors import invalid
from penstock.shm.messages import MAX_CONTEXT_TOKENS

Query = Annotated[str, Meta(min_length=1)]
Instruction = Annotated[str, Meta(max_length=65536)]


class Document(Struct):
    """A document with its text among other fields, which are ignored."""

    text: str


class RerankBody(TruncatedBody, kw_only=True):
    query: Query
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """0, vLLM's default, is all."""
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)] | None = None
    truncate: bool | None = None
    """Like truncate_prompt_tokens -1. Cohere always truncates."""
    use_activation: bool | None = None
    instruction: Instruction | None = None

    max_chunks_per_doc: Raw = ABSENT
    rank_fields: Raw = ABSENT

    def texts(self) -> list[str]:
        return [item if isinstance(item, str) else item.text for item in self.documents]


_rerank = msgspec.json.Decoder(RerankBody)


def decode_rerank(data: bytes) -> RerankBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = decode_body(_rerank, data)
    body.check_truncation()
    check_number("documents", len(body.documents))
    if body.add_special_tokens is not None:
        invalid("add_special_tokens", "a pair always has those of the model")
    return body
