"""POST /v1/responses/compact: reduces a conversation to its user's messages and a summary, for the next request's
input."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.frontend.formats.base import Identity, Usage, WholeFormat, encode
from penstock.frontend.parsing.blocks import ChoiceOutput
from penstock.frontend.schemas.responses import SUMMARY_MARK

REQUEST = (
    "Summarize this conversation so that somebody who has not read it can continue it: what was asked, what was found "
    "and decided, what was done with which results, and what is still to do. Write the summary only."
)
_LEAD = "Summary of the conversation before this message:\n\n"


def summary_in(content: str) -> str:
    """Return the message that stands for a compaction item in the conversation."""
    return _LEAD + content.removeprefix(SUMMARY_MARK)


class CompactionFormat(WholeFormat):
    """Implements `Format`."""

    def __init__(self, identity: Identity, usage: Usage, user_texts: Sequence[str]) -> None:
        self._identity = identity
        self._usage = usage
        self._user_texts = user_texts

    def whole(self, outputs: list[ChoiceOutput]) -> bytes:
        suffix, usage = self._identity.response_id.partition("_")[2], self._usage
        kept = [
            {
                "id": f"msg_{suffix}_{index}",
                "type": "message",
                "status": "completed",
                "role": "user",
                "content": [{"type": "input_text", "text": text}],
            }
            for index, text in enumerate(self._user_texts)
        ]
        summary = {"id": f"cmp_{suffix}", "type": "compaction", "encrypted_content": SUMMARY_MARK + outputs[0].text}
        return encode(
            {
                "id": self._identity.response_id,
                "object": "response.compaction",
                "created_at": self._identity.created,
                "output": [*kept, summary],
                "usage": {
                    "input_tokens": usage.prompt_tokens,
                    "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                    "output_tokens": usage.completion_tokens,
                    "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                    "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                },
            }
        )
