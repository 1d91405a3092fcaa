"""Stop strings: holds text back while it may be the beginning of one."""

from __future__ import annotations


class StopMatcher:
    """Passes text on until a stop string is complete. Any split of the text gives the same result.

    The stop string that is completed first matches. If several are completed at the same character, the longest
    matches. The matched text itself is passed on only if keeps_match.
    """

    def __init__(self, stop_strings: tuple[str, ...], *, keeps_match: bool = False) -> None:
        """No stop string may be empty."""
        self._keeps_match = keeps_match
        self._stop_strings = stop_strings
        self._by_first_character: dict[str, tuple[str, ...]] = {}
        for stop in stop_strings:
            self._by_first_character[stop[0]] = (*self._by_first_character.get(stop[0], ()), stop)
        self._longest = max(map(len, stop_strings), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is certain now; nothing after a match."""
        if self.matched is not None:
            return ""
        if not self._stop_strings:
            return text
        self._held += text
        first_end = len(self._held) + 1
        for stop in self._stop_strings:
            start = self._held.find(stop)
            end = start + len(stop)
            if start >= 0 and (end, -len(stop)) < (first_end, -len(self.matched or "")):
                first_end, self.matched = end, stop
        if self.matched is not None:
            certain = self._held[: first_end - (0 if self._keeps_match else len(self.matched))]
            self._held = ""
            return certain
        split = len(self._held) - self._num_doubtful()
        certain, self._held = self._held[:split], self._held[split:]
        return certain

    def flush(self) -> str:
        """End the text. Return what was held back: it is not a stop string after all."""
        held, self._held = self._held, ""
        return held

    def _num_doubtful(self) -> int:
        """Number of characters at the end that may be the beginning of a stop string."""
        held, by_first_character = self._held, self._by_first_character
        for start in range(max(0, len(held) - self._longest + 1), len(held)):
            # Most characters begin no stop string: no tail is cut for them.
            for stop in by_first_character.get(held[start], ()):
                if stop.startswith(held[start:]):
                    return len(held) - start
        return 0
