"""Log probabilities in the three shapes that clients expect."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from msgspec import Raw

from penstock.frontend.formats.base import encode
from penstock.frontend.parsing.deltas import ScoredToken

_MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express."""


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _MIN_LOGPROB)


def chat_logprobs(entries: Sequence[ScoredToken]) -> Raw:
    """Return choices[].logprobs of a chat completion."""
    return Raw(b'{"content":%b,"refusal":null}' % bytes(chat_entries(entries)))


def chat_entries(entries: Sequence[ScoredToken]) -> Raw:
    """Return the tokens with their log probabilities, as in chat completions and responses."""
    encoded = [
        b'%b,"top_logprobs":[%b]}' % (_chat_entry(entry), b",".join(_chat_entry(top) + b"}" for top in entry.top))
        for entry in entries
    ]
    return Raw(b"[%b]" % b",".join(encoded))


def _chat_entry(entry: ScoredToken) -> bytes:
    """Return the entry without its closing brace."""
    return _chat_head(entry.text, entry.raw) + encode(_number(entry.logprob))


@lru_cache(1 << 16)
def _chat_head(text: str, raw: bytes) -> bytes:
    """Return the part of an entry that depends on the token alone."""
    return encode({"token": text, "bytes": list(raw)})[:-1] + b',"logprob":'


def legacy_logprobs(entries: Sequence[ScoredToken]) -> dict[str, Any]:
    """Return choices[].logprobs of a text completion. top_logprobs always includes the token itself."""
    return {
        "tokens": [_legacy_text(entry) for entry in entries],
        "token_logprobs": [_number(entry.logprob) for entry in entries],
        "top_logprobs": [
            None
            if entry.logprob is None
            else {_legacy_text(other): _number(other.logprob) for other in (*entry.top, entry)}
            for entry in entries
        ],
        "text_offset": [entry.offset for entry in entries],
    }


def _legacy_text(entry: ScoredToken) -> str:
    """Write parts of characters as bytes, as OpenAI does: as text they would all look the same."""
    if "\ufffd" not in entry.text or entry.text.encode() == entry.raw:
        return entry.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.raw)


def prompt_logprobs(entries: Sequence[ScoredToken]) -> Raw:
    """Return choices[].prompt_logprobs as in vLLM: per token, itself and the likeliest ones by token id."""
    return Raw(b"[%b]" % b",".join(map(_prompt_entry, entries)))


def _prompt_entry(entry: ScoredToken) -> bytes:
    if entry.logprob is None:
        return b"null"
    ranked = {entry.token_id: _ranked(entry, entry.rank)}
    for rank, top in enumerate(entry.top, start=1):
        ranked[top.token_id] = _ranked(top, rank)
    return b"{%b}" % b",".join(ranked.values())


def _ranked(entry: ScoredToken, rank: int) -> bytes:
    text = _text(entry.text)
    return b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}' % (
        entry.token_id,
        encode(_number(entry.logprob)),
        rank,
        text,
    )


@lru_cache(1 << 16)
def _text(text: str) -> bytes:
    return encode(text)
