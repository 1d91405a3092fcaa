"""Token ids to text as they come, without ever emitting half a character."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_LONGEST_TAIL = 3
"""An unfinished UTF-8 character decodes to at most this many replacement characters, one per byte that is there."""


class WindowDetokenizer:
    """Works with any tokenizer: decodes a short window of tokens again and emits what is new in it.

    The window begins with tokens already emitted, for their context: a tokenizer may drop the space that starts a text.
    Prompt tokens are never in it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """decode turns a whole list of ids into text, special tokens left out."""
        self._decode = decode
        self._window: list[int] = []
        self._num_context = 0
        self._num_emitted = 0
        """Characters of the decoded window that have been emitted."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text these tokens add, less a last character that is not complete."""
        emitted = []
        for token_id in token_ids:
            self._window.append(token_id)
            text = self._decode(self._window)
            certain = text
            if text.endswith(_REPLACEMENT):
                certain = text[:-_LONGEST_TAIL] + text[-_LONGEST_TAIL:].rstrip(_REPLACEMENT)
            if len(certain) > self._num_emitted:
                emitted.append(certain[self._num_emitted :])
                self._num_emitted = len(certain)
                if certain is text:
                    self._slide()
        return "".join(emitted)

    def flush(self) -> str:
        """The stream has ended: what is left, an unfinished character as U+FFFD."""
        text = self._decode(self._window)
        return text[self._num_emitted :]

    def _slide(self) -> None:
        context = self._window[self._num_context :]
        text = self._decode(context)
        if text:
            self._window = context
            self._num_emitted = len(text)
            self._num_context = len(context)
