"""Turns a stream of token ids into text, without ever emitting half a character."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

_REPLACEMENT = "\ufffd"
_LONGEST_TAIL = 3
"""An incomplete UTF-8 character decodes to at most this many replacement characters, one per available byte."""
_LONGEST_WINDOW = 16
_CONTEXT = 8


class Detokenizer:
    """The text of one stream. For each token it decodes a short window of the last tokens and emits the new text.

    The window begins with tokens whose text is already emitted, as context: a tokenizer may drop the space that starts
    a text. It never contains prompt tokens. Tokens are taken one by one, so batching does not change the text.
    """

    def __init__(self, decode: Callable[[tuple[int, ...]], str], silent_ids: Container[int] = frozenset()) -> None:
        """decode turns token ids into text. silent_ids never have text, such as special tokens."""
        self._decode = decode
        self._silent_ids = silent_ids
        self._window: tuple[int, ...] = ()
        self._num_context = 0
        self._num_emitted = 0
        """Emitted characters of the decoded window."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens add, without a last character that may be incomplete."""
        emitted = ""
        for token_id in token_ids:
            if token_id in self._silent_ids:
                continue
            self._window += (token_id,)
            text = self._decode(self._window)
            end = len(text)
            is_long = len(self._window) > _LONGEST_WINDOW
            if text.endswith(_REPLACEMENT):
                # Not only the last three: some decoders write U+FFFD for a whole run of bytes until it is complete.
                doubtful = text[-_LONGEST_TAIL:] if is_long else text
                end -= len(doubtful) - len(doubtful.rstrip(_REPLACEMENT))
            if end > self._num_emitted:
                emitted += text[self._num_emitted : end]
                self._num_emitted = end
                if end == len(text):
                    self._slide(text, self._window[self._num_context :])
            if is_long:
                # Bytes that never become a character must not grow the window, and the time per token, without bound.
                self._slide(text, self._window[-_CONTEXT:])
        return emitted

    def flush(self) -> str:
        """End the stream. Return what was held back: an incomplete character."""
        return self._decode(self._window)[self._num_emitted :]

    def _slide(self, text: str, context: tuple[int, ...]) -> None:
        """Move the window to context, its last tokens. Text that is not emitted yet stays at its end."""
        context_text = self._decode(context)
        num_held = len(text) - self._num_emitted
        if len(context_text) > num_held:
            self._window = context
            self._num_context = len(context)
            self._num_emitted = len(context_text) - num_held
