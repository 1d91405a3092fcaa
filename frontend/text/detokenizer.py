"""Token ids to text as they come, without ever emitting half a character."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

_REPLACEMENT = "\ufffd"
_LONGEST_TAIL = 3
"""An unfinished UTF-8 character decodes to at most this many replacement characters, one per byte that is there."""
_LONGEST_WINDOW = 16
_CONTEXT = 8


class Detokenizer:
    """One stream's text. Decodes a short window of its last tokens again for each token, and emits what is new in it.

    The window begins with tokens already emitted, for their context: a tokenizer may drop the space that starts a text.
    Prompt tokens are never in it. Tokens are taken one by one, so how they were batched changes nothing.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], silent_ids: Container[int] = frozenset()) -> None:
        """decode turns a list of ids into text; silent_ids are those that never have any, such as special tokens."""
        self._decode = decode
        self._silent_ids = silent_ids
        self._window: list[int] = []
        self._num_context = 0
        self._num_emitted = 0
        """Characters of the decoded window that have been emitted."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text these tokens add, less a last character that may not be complete."""
        emitted = ""
        for token_id in token_ids:
            if token_id in self._silent_ids:
                continue
            self._window.append(token_id)
            text = self._decode(self._window)
            end = len(text)
            is_long = len(self._window) > _LONGEST_WINDOW
            if text.endswith(_REPLACEMENT):
                # Not only the last three: some decoders turn a whole run of bytes into U+FFFD until it is complete.
                doubtful = text[-_LONGEST_TAIL:] if is_long else text
                end -= len(doubtful) - len(doubtful.rstrip(_REPLACEMENT))
            if end > self._num_emitted:
                emitted += text[self._num_emitted : end]
                self._num_emitted = end
                if end == len(text):
                    self._slide(text, self._window[self._num_context :])
            if is_long:
                # Bytes that never make a character must not make the window, and each step, longer and longer.
                self._slide(text, self._window[-_CONTEXT:])
        return emitted

    def flush(self) -> str:
        """The stream has ended: what was held back, which is no complete character."""
        return self._decode(self._window)[self._num_emitted :]

    def _slide(self, text: str, context: list[int]) -> None:
        """Starts the window at context, its last tokens; what is not emitted stays at its end."""
        context_text = self._decode(context)
        num_held = len(text) - self._num_emitted
        if len(context_text) > num_held:
            self._window = context
            self._num_context = len(context)
            self._num_emitted = len(context_text) - num_held
