"""Log probabilities from the backend, by token id, as tokens with text, bytes and offset."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from penstock.frontend.parsing.deltas import ScoredToken
from penstock.frontend.text.token_bytes import TokenBytes
from penstock.shm.client import LogprobEntry

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def score_token(token_bytes: TokenBytes, token_id: int, entry: LogprobEntry, offset: int) -> ScoredToken:
    """offset is the token's start in the choice's text, in characters."""
    text_and_bytes = token_bytes.text_and_bytes
    top = tuple(
        ScoredToken(top_id, *text_and_bytes(top_id), logprob)
        for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
    )
    text, raw = text_and_bytes(token_id)
    return ScoredToken(token_id, text, raw, entry.logprob, entry.rank, top, offset)


def with_own_first(token_id: int, entry: LogprobEntry) -> LogprobEntry:
    """Return the entry with the token itself before the others, as vLLM answers a request that names tokens."""
    values = {token_id: entry.logprob} | dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
    return msgspec.structs.replace(entry, top_ids=tuple(values), top_logprobs=tuple(values.values()))


def named_by_id(scored: ScoredToken) -> ScoredToken:
    """Return the token, and those beside it, with the text token_id:N."""
    name = f"token_id:{scored.token_id}"
    return msgspec.structs.replace(scored, text=name, raw=name.encode(), top=tuple(map(named_by_id, scored.top)))


def score_prompt(
    token_bytes: TokenBytes, token_ids: Sequence[int], entries: Sequence[LogprobEntry], text: str
) -> list[ScoredToken]:
    """Score a prompt. entries has one element fewer than token_ids: the first token has no log probability.

    text is the text of the prompt, for the offsets.
    """
    first = token_ids[0]
    offsets = _offsets(token_bytes, token_ids, text)
    scored = [
        score_token(token_bytes, token_id, entry, offset)
        for token_id, entry, offset in zip(token_ids[1:], entries, offsets[1:], strict=True)
    ]
    return [ScoredToken(first, *token_bytes.text_and_bytes(first), None), *scored]


def _offsets(token_bytes: TokenBytes, token_ids: Sequence[int], text: str) -> list[int]:
    """Return where each token starts in the text, in characters.

    Counted from the end of the text, because the tokens may spell more than the text: some tokenizers put a special
    token or a space before it.
    """
    decoder = _Utf8Decoder("replace")
    starts, num_characters = [], 0
    for token_id in token_ids:
        starts.append(num_characters)
        num_characters += len(decoder.decode(token_bytes(token_id)))
    num_surplus = num_characters + len(decoder.decode(b"", final=True)) - len(text)
    return [max(0, start - num_surplus) for start in starts]
