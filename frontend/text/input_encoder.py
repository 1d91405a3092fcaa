"""Turns texts and pairs of texts into a model's inputs: special tokens, limits, truncation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from penstock.process.native_libraries import truncate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Encoding

    from penstock.process.native_libraries import GuardedTokenizer

Side: TypeAlias = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class EncodedInput:
    token_ids: list[int]
    second_start: int
    """Position of the first token of a pair's second text; 0 if there is one text."""
    num_whole_tokens: int
    """Tokens before truncation."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """max_tokens includes special tokens. side is the end that is dropped; in a pair the longer text is cut first."""

    max_tokens: int | None = None
    side: Side = "right"
    max_second_tokens: int | None = None
    """Limit of a pair's second text alone; it is cut before anything else is."""


class InputEncoder:
    """Encodes by the tokenizer's own template of single texts and pairs. Callable from any thread."""

    def __init__(self, tokenizer: GuardedTokenizer) -> None:
        """The tokenizer has neither truncation nor padding."""
        self._tokenizer = tokenizer

    def encode(
        self, items: Sequence[str | tuple[str, str]], truncation: Truncation, *, add_special_tokens: bool = True
    ) -> list[EncodedInput]:
        encoded = []
        # encode() holds the GIL; the batch call releases it.
        whole = self._tokenizer.encode_batch_fast(list(items), add_special_tokens=add_special_tokens)
        for item, encoding in zip(items, whole, strict=True):
            num_whole = len(encoding.ids)
            is_too_long = truncation.max_tokens is not None and num_whole > truncation.max_tokens
            if is_too_long or (truncation.max_second_tokens is not None and not isinstance(item, str)):
                encoding = self._truncated(item, truncation, add_special_tokens)
            start = _second_start(encoding) if not isinstance(item, str) else 0
            encoded.append(EncodedInput(encoding.ids, start, num_whole))
        return encoded

    def _truncated(self, item: str | tuple[str, str], truncation: Truncation, add_special_tokens: bool) -> Encoding:
        """Truncate as the tokenizer would; its own truncation cannot be set while another thread uses it."""
        texts = (item,) if isinstance(item, str) else item
        parts = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        if len(parts) > 1 and truncation.max_second_tokens is not None:
            truncate(parts[1], truncation.max_second_tokens, truncation.side)
        if truncation.max_tokens is not None:
            is_pair = len(parts) > 1
            num_special = self._tokenizer.num_special_tokens_to_add(is_pair) if add_special_tokens else 0
            space = max(0, truncation.max_tokens - num_special)
            for part, num_kept in zip(parts, _longest_first([len(part.ids) for part in parts], space), strict=True):
                truncate(part, num_kept, truncation.side)
        second = parts[1] if len(parts) > 1 else None
        return self._tokenizer.post_process(parts[0], second, add_special_tokens)


def _longest_first(lengths: list[int], space: int) -> list[int]:
    """Return how many tokens are kept of one text or two.

    Tokens are taken from the longer one until both are equally long, and then from both. If an odd number is left, the
    second keeps one more, as in tokenizers.
    """
    if sum(lengths) <= space:
        return lengths
    if len(lengths) == 1:
        return [space]
    shorter, longer = sorted(lengths)
    if shorter > space - shorter:
        shorter = space // 2
    longer = space - shorter
    first, second = lengths
    return [shorter, longer] if first <= second else [longer, shorter]


def _second_start(encoding: Encoding) -> int:
    """Return where the second text starts: by the token types, or by the texts for a model without types.

    0 if the second text has no tokens.
    """
    types = encoding.type_ids
    if 1 in types:
        return int(types.index(1))
    sequences = encoding.sequence_ids
    return int(sequences.index(1)) if 1 in sequences else 0
