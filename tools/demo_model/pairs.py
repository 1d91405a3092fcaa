"""Training pairs of the demo embedding model: a question, and the page of the documentation that answers it.

Pages and questions come from the same docstrings (`entries`), so that training needs nothing but Python.
"""

from __future__ import annotations

import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from penstock.tools.demo_model.corpus import HELD_OUT
from penstock.tools.demo_model.entries import Entry, read_entries

_QUESTIONS = (
    "{}",
    "{}",
    "how to {}",
    "how do I {}?",
    "function to {}",
    "which function can {}?",
    "python {}",
    "I want to {}",
    "what is used to {}?",
)
_MIN_WORDS_KEPT = 2
_MAX_PAGE_CHARS = 600
_MAX_SUMMARY_CHARS = 200


@dataclass(frozen=True, slots=True)
class Page:
    """A documented object, or a function of the source that has no docstring."""

    module: str
    name: str
    signature: str
    summary: str
    """The docstring's first sentence; "" without one."""
    rest: str
    """The text that follows it, or the function's source."""

    @property
    def text(self) -> str:
        """The text that is embedded for a search of the documentation."""
        return f"{self.name}{self.signature}\n{self.summary}\n{self.rest}".strip()[:_MAX_PAGE_CHARS]

    @property
    def text_without_summary(self) -> str:
        return f"{self.name}{self.signature}\n{self.rest}".strip()[:_MAX_PAGE_CHARS]


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of HELD_OUT's modules have docstrings, and are in no training pair."""

    training: list[Page]
    held_out: list[Page]


def read_pages() -> Pages:
    """Read the running interpreter's standard library, in a fixed order."""
    entries = read_entries(Path(sysconfig.get_path("stdlib")))
    pages = [(entry.module.split(".")[0] in HELD_OUT, page) for entry in entries if (page := _page(entry)) is not None]
    return Pages(
        [page for is_held_out, page in pages if not is_held_out],
        [page for is_held_out, page in pages if is_held_out and page.summary],
    )


def _page(entry: Entry) -> Page | None:
    if not entry.doc:
        return Page(entry.module, entry.name, "", "", entry.source) if entry.source else None
    doc = " ".join(entry.doc.split())
    match = re.match(r"(.{8,200}?[.:;!?])(\s|$)", doc)
    summary = match[1].rstrip(".:;") if match else doc[:_MAX_SUMMARY_CHARS]
    return Page(
        entry.module, entry.name, entry.signature, summary, doc[match.end() if match else len(summary) :].strip()
    )


def name_words(name: str) -> str:
    """collections.OrderedDict.move_to_end → collections ordered dict move to end."""
    return " ".join(re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[._]+", " ", name).lower().split())


def make_pair(page: Page, rng: random.Random) -> tuple[str, str]:
    """A question and the text that answers it.

    Sometimes the words that both share are removed from the text, so that the model must learn more than equal words.
    """
    if not page.summary:
        return name_words(page.name), page.rest[:_MAX_PAGE_CHARS].partition("\n")[2] or page.rest[:_MAX_PAGE_CHARS]
    kind = rng.random()
    if kind < 0.15:
        return name_words(page.name), f"{page.summary}. {page.rest}"[:_MAX_PAGE_CHARS]
    if kind < 0.3 and (sentences := [part for part in page.rest.split(". ") if 20 < len(part) < _MAX_SUMMARY_CHARS]):
        sentence = rng.choice(sentences)
        return sentence, page.text.replace(sentence, " ") if rng.random() < 0.5 else page.text
    question = rng.choice(_QUESTIONS).format(_lower_first(page.summary))
    if rng.random() < 0.4:
        question = _keep_some_words(page.summary, rng)
    text = rng.choice((page.text, page.text, page.text_without_summary, f"{page.name}: {page.summary}"))
    return question, text


def _lower_first(text: str) -> str:
    text = re.sub(r"^(Returns?|Gets?) ", "get ", text)
    return text[:1].lower() + text[1:]


def _keep_some_words(text: str, rng: random.Random) -> str:
    words = text.lower().split()
    num_kept = max(_MIN_WORDS_KEPT, round(len(words) * rng.uniform(0.3, 0.8)))
    kept = sorted(rng.sample(range(len(words)), min(num_kept, len(words))))
    return " ".join(words[index] for index in kept)
