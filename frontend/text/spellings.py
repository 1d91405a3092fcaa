"""Keeps the texts of special tokens in a client's strings texts.

Before a template renders, a mark goes behind the first character of each such text, so that the tokenizer finds no
token there. The mark is a private-use character that the request does not contain; its own tokens are dropped.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from penstock.frontend.transport.errors import invalid

_FIRST_PRIVATE, _NUM_PRIVATE = 0xE000, 6400
_ATTEMPTS = 8
_MAX_PREFIX = 32
"""Characters of a token's text that are compared before rendering: the expressions nest this deep."""
_NUMBER = re.compile(r"\d+")
"""Tokens that differ in a number, of which a model may have thousands, are one form: with 0, for any number."""
_WORD = re.compile(r"\w+")
_NOTHING = "(?!)"
_OWN = secrets.token_hex(16)
"""Stands around a text that is the server's own. No client knows it, and no prompt contains it."""
_END = "\0"


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A prompt. What the mark cuts is not the text of a special token; without a mark nothing is cut."""

    text: str
    mark: str = ""

    @property
    def plain(self) -> str:
        return unmarked(self.text, self.mark)


def own(text: str) -> str:
    """Return a text for a message in which special tokens stay tokens, whatever is around it."""
    return f"{_OWN}{text}{_OWN}"


class Spellings:
    """The texts of a model's special tokens, as clients may spell them. Immutable."""

    def __init__(self, texts: Iterable[str], own: Collection[str] = ()) -> None:
        """own: those that the template itself looks for in an assistant's message, such as the end of reasoning."""
        # A word or a blank is ordinary text, and one character cannot be cut.
        self._texts = {text for text in texts if len(text) > 1 and not _WORD.match(text) and not text.isspace()}
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        self._any = _Expressions(self._texts)
        self._assistant = _Expressions(self._texts.difference(own)) if own else self._any

    def mark(self, variables: dict[str, Any], *, continues: bool) -> tuple[dict[str, Any], str]:
        """Return a template's variables, `messages` among them, with marks; and the mark, if there are any.

        continues: the last message is the beginning of the model's answer, in its own language. Raises ApiError.
        """
        strings: list[str] = []
        _collect(variables, strings)
        joined = _END + _END.join(strings) + _END
        given = joined.replace(_OWN, _END)
        if not self._texts or self._any.either.search(given) is None:
            return variables if _OWN not in joined else _marked(variables, _NONE, ""), ""
        marks = (chr(_FIRST_PRIVATE + secrets.randbelow(_NUM_PRIVATE)) for _ in range(_ATTEMPTS))
        mark = next((mark for mark in marks if mark not in given and _escaped(mark) not in given), None)
        if mark is None:
            invalid("messages", "the text of a special token beside thousands of private-use characters; drop these")
        messages = variables["messages"]
        num_marked = len(messages) - continues
        marked = [
            _marked(message, self._assistant if message["role"] == "assistant" else self._any, mark)
            for message in messages[:num_marked]
        ]
        others = {name: value for name, value in variables.items() if name != "messages"}
        return {
            **_marked(others, self._any, mark),
            "messages": marked + _marked(messages[num_marked:], _NONE, ""),
        }, mark

    def mark_texts(self, texts: list[str]) -> tuple[list[str], str]:
        """Return texts with the marks that cut a token's text; and the mark. Raises ApiError."""
        marked, mark = self.mark({"messages": [], "texts": texts}, continues=False)
        return [self.settle(text, mark).text for text in marked["texts"]], mark

    def settle(self, rendered: str, mark: str) -> MarkedText:
        """Return the prompt with the marks that cut the text of a token; the others were a precaution."""
        if not mark:
            return MarkedText(rendered)
        pieces = rendered.replace(_escaped(mark), mark).split(mark)
        text, cuts = "".join(pieces), list(accumulate(map(len, pieces[:-1])))
        needed: set[int] = set()
        for found in self._any.begun.finditer(text):
            start = found.start()
            length = next((n for n in self._lengths if text[start : start + n] in self._texts), 0)
            needed.update(cuts[bisect_right(cuts, start) : bisect_left(cuts, start + length)])
        bounds = [0, *sorted(needed), len(text)]
        return MarkedText(mark.join(text[a:b] for a, b in pairwise(bounds)), mark if needed else "")


class _Expressions:
    """Find places for marks, some of them needless. Where a template writes strings side by side, or between < and >, a
    text can be in parts.

    begun finds the first character of a text, or of its beginning at a string's end. continued finds the blanks at a
    string's start before the middle of a text. either finds whether there is a place in strings between _END.
    """

    def __init__(self, texts: Collection[str]) -> None:
        forms = {_NUMBER.sub("0", text) for text in texts}
        by_first: dict[str, set[str]] = {}
        for form in forms:
            by_first.setdefault(form[0], set()).add(form[1:_MAX_PREFIX])
        firsts = (f"{re.escape(first)}(?={_any_of(rests, or_end=True)})" for first, rests in by_first.items())
        begun = "|".join(firsts) or _NOTHING
        middles = {form[skipped:-2][:_MAX_PREFIX] for form in forms for skipped in (1, 2)}
        middles = {middle for middle in middles if len(middle) > 1 and not _WORD.fullmatch(middle)}
        continued = rf"\s*(?={_any_of(middles)})" if middles else _NOTHING
        self.begun, self.continued = re.compile(begun), re.compile(continued)
        self.either = re.compile(f"{begun}|{_END}{continued}")


def _any_of(forms: Iterable[str], *, or_end: bool = False) -> str:
    """Return an expression for any of the forms; or_end: or for the beginning of one at the end of a string."""
    by_first: dict[str, set[str]] = {}
    for form in forms:
        if not form:
            return ""  # longer forms begin with this one
        by_first.setdefault(form[0], set()).add(form[1:])
    branches = [
        (r"\d+" if first == "0" else re.escape(first)) + _any_of(rests, or_end=or_end)
        for first, rests in by_first.items()
    ]
    if or_end:
        branches.append(rf"\s*(?:\Z|{_END})")
    return f"(?:{'|'.join(branches)})"


def _collect(value: Any, strings: list[str]) -> None:
    if isinstance(value, str):
        strings.append(value)
    elif isinstance(value, list):
        for element in value:
            _collect(element, strings)
    elif isinstance(value, dict):
        strings += value
        for element in value.values():
            _collect(element, strings)


def _marked_text(text: str, expressions: _Expressions, mark: str) -> str:
    blanks = expressions.continued.match(text)
    start = 0 if blanks is None else blanks.end()
    before = "" if blanks is None else text[:start] + mark
    return before + expressions.begun.sub(rf"\g<0>{mark}", text[start:])


def _marked(value: Any, expressions: _Expressions, mark: str) -> Any:
    if isinstance(value, str):
        parts = value.split(_OWN)
        parts[::2] = (_marked_text(part, expressions, mark) for part in parts[::2])
        return "".join(parts)
    if isinstance(value, list):
        return [_marked(element, expressions, mark) for element in value]
    if isinstance(value, dict):
        return {
            _marked(name, expressions, mark): _marked(element, expressions, mark) for name, element in value.items()
        }
    return value


def unmarked(text: str, mark: str) -> str:
    """Return a text without the mark, also as JSON and Python may write it."""
    return text.replace(mark, "").replace(_escaped(mark), "") if mark else text


def _escaped(mark: str) -> str:
    """Return what JSON and Python may write for the mark."""
    return f"\\u{ord(mark):04x}"


_NONE = _Expressions(())
NO_SPELLINGS = Spellings(())
"""Marks nothing."""
