"""POST /v1/score with SGLang's fields: the probability that a generating model assigns to each of some next tokens."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from penstock.frontend.schemas.decoding import decode_body
from penstock.frontend.schemas.generation import MAX_CHOICES, SchedulingBody, ShortText
from penstock.frontend.transport.errors import invalid
from penstock.shm.messages import TokenId

Tokens: TypeAlias = Annotated[list[TokenId], Meta(min_length=1)]
_FIELD = b'"label_token_ids"'


class LabelScoreBody(SchedulingBody, kw_only=True):
    query: str | Tokens
    items: str | Annotated[list[str | Tokens], Meta(min_length=1, max_length=MAX_CHOICES)]
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_CHOICES)]
    apply_softmax: bool | None = None
    item_first: bool | None = None
    model: ShortText | None = None

    def prompts(self) -> list[str | int | list[int]]:
        """Return the text or the tokens of each item with the query. Raises ApiError."""
        items = [self.items] if isinstance(self.items, str) else self.items
        joined: list[str | int | list[int]] = []
        for position, item in enumerate(items):
            if isinstance(self.query, str) and isinstance(item, str):
                joined.append(item + self.query if self.item_first else self.query + item)
            elif isinstance(self.query, list) and isinstance(item, list):
                joined.append([*item, *self.query] if self.item_first else [*self.query, *item])
            else:
                invalid(f"items[{position}]", "must be a text if query is one, else a list of token ids")
        if len(joined) * len(self.label_token_ids) > MAX_CHOICES:
            number = f"{len(joined)} items with {len(self.label_token_ids)} label_token_ids"
            invalid("items", f"{number} make more than {MAX_CHOICES} scores, the limit")
        return joined


_decoder = msgspec.json.Decoder(LabelScoreBody)


def is_label_score(data: bytes) -> bool:
    """Whether the body is SGLang's; vLLM's has no such field."""
    return _FIELD in data


def decode_label_score(data: bytes) -> LabelScoreBody:
    """Raises ApiError naming the field, its value and the limit."""
    return decode_body(_decoder, data)
