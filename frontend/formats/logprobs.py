"""Log probabilities in the three shapes in which clients expect them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frontend.deltas import TokenLogprob

_LEAST = -9999.0
"""Stands for minus infinity, which JSON has no number for."""


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST)


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """choices[].logprobs of a chat completion."""
    content = [_chat_entry(entry) | {"top_logprobs": [_chat_entry(top) for top in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def _chat_entry(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": _number(entry.logprob), "bytes": list(entry.raw)}


def legacy_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """choices[].logprobs of a completion. The token itself is always among the likeliest, and may be one more."""
    return {
        "tokens": [_legacy_text(entry) for entry in entries],
        "token_logprobs": [_number(entry.logprob) for entry in entries],
        "top_logprobs": [
            None
            if entry.logprob is None
            else {_legacy_text(told): _number(told.logprob) for told in (*entry.top, entry)}
            for entry in entries
        ],
        "text_offset": [entry.offset for entry in entries],
    }


def _legacy_top(entry: TokenLogprob) -> dict[str, float | None]:
    return {_legacy_text(told): _number(told.logprob) for told in (*entry.top, entry)}


def _legacy_text(entry: TokenLogprob) -> str:
    """Parts of characters by their bytes, as OpenAI writes them: as texts they would all be the same."""
    if "\ufffd" not in entry.text or entry.text.encode() == entry.raw:
        return entry.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.raw)


def prompt_logprobs(entries: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """choices[].prompt_logprobs as vLLM has it: by token id, the prompt's own token and the likeliest at its place."""
    told: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry.logprob is None:
            told.append(None)
            continue
        ranked = {str(top.token_id): _ranked(top, rank) for rank, top in enumerate(entry.top, start=1)}
        told.append({str(entry.token_id): _ranked(entry, entry.rank)} | ranked)
    return told


def _ranked(entry: TokenLogprob, rank: int) -> dict[str, Any]:
    return {"logprob": _number(entry.logprob), "rank": rank, "decoded_token": entry.text}
