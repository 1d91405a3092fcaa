"""Drops the oldest turns of a chat that is too long for the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.endpoints.prompts import render_chat
from penstock.frontend.transport.errors import ApiError, ErrorKind

if TYPE_CHECKING:
    from penstock.frontend.generation.models.served_model import ServedModel
    from penstock.frontend.schemas.chat import ChatBody


async def fitted(body: ChatBody, served: ServedModel) -> ChatBody:
    """Return the chat with as many of its last turns as leave space for the answer, and at least one turn.

    Instructions stay. A turn begins with a user message, so that no call is separated from its result. Raises ApiError.
    """
    num_fixed = 1 if body.messages[0].role in ("system", "developer") else 0
    rest = body.messages[num_fixed:]
    cuts = [0, *(position for position, message in enumerate(rest) if position and message.role == "user")]
    max_prompt_tokens = served.card.max_context_tokens - (body.max_completion_tokens or 1)

    def without(num_dropped: int) -> ChatBody:
        return msgspec.structs.replace(body, messages=body.messages[:num_fixed] + rest[num_dropped:])

    async def fits(num_dropped: int) -> bool:
        try:
            return len(await render_chat(without(num_dropped), served, is_long=True)) <= max_prompt_tokens
        except ApiError as error:
            if error.kind is ErrorKind.CONTEXT_TOO_LONG:
                return False
            raise

    if await fits(0):
        return body
    low, high = 1, len(cuts)
    while low < high:
        middle = (low + high) // 2
        if await fits(cuts[middle]):
            high = middle
        else:
            low = middle + 1
    return without(cuts[min(low, len(cuts) - 1)])
