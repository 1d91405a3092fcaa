"""The training text of the demo model: documentation that every CPython installation includes.

There are four kinds of documents: reference pages (name, signature, docstring), the language reference of
`pydoc_data.topics`, functions of the standard library's source, and chats made from the same docstrings. Modules in
HELD_OUT are in no training document; they make the held-out set.
"""

from __future__ import annotations

import ast
import importlib
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal, TypedDict

from penstock.tools.demo_model.chats import GREETINGS, SMALL_TALK, SYSTEM_PROMPTS
from penstock.tools.demo_model.entries import Entry, clean_doc, read_entries

HELD_OUT = frozenset(
    """
    cmd colorsys fileinput filecmp getopt gettext heapq netrc poplib queue sched shlex statistics telnetlib textwrap
    timeit uuid wave webbrowser xdrlib zipapp
    """.split()  # noqa: SIM905  # a table of words
)
"""Top-level modules excluded from training: large enough to measure on, and rarely asked about in a demonstration."""

_POPULAR = frozenset(
    """
    builtins collections csv datetime functools itertools json logging math os os.path pathlib random re shutil string
    subprocess sys threading time typing
    """.split()  # noqa: SIM905  # a table of words
)
"""Modules asked about twice as often."""

_MAX_ANSWER_CHARS = 600
_MAX_PIECE_CHARS = 6000
_SMALL_TALK_REPEATS = 12


class ChatTurn(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in a fixed order. A text is one whole document, a chat one whole conversation."""

    texts: list[str]
    chats: list[list[ChatTurn]]
    held_out_texts: list[str]


def build_corpus(seed: int) -> Corpus:
    """Read the running interpreter's standard library. The same interpreter and seed give the same corpus."""
    rng = random.Random(seed)  # noqa: S311
    stdlib = Path(sysconfig.get_path("stdlib"))
    entries = read_entries(stdlib)
    training = [entry for entry in entries if entry.module.split(".")[0] not in HELD_OUT]
    topics = _topics()
    texts = [_reference_page(entry) for entry in training if entry.doc]
    texts += [entry.source for entry in training if entry.source]
    texts += [piece for _, text in topics for piece in _pieces(text)]
    texts += [piece for text in _other_pages(stdlib) for piece in _pieces(text)]
    return Corpus(
        texts=list(dict.fromkeys(texts)),
        chats=_chats(training, topics, rng),
        held_out_texts=_held_out_pages(entries),
    )


def held_out_texts() -> list[str]:
    """The held-out set alone."""
    return _held_out_pages(read_entries(Path(sysconfig.get_path("stdlib"))))


def _held_out_pages(entries: list[Entry]) -> list[str]:
    held_out = (entry for entry in entries if entry.module.split(".")[0] in HELD_OUT)
    return list(dict.fromkeys(_reference_page(entry) for entry in held_out if entry.doc))


def _reference_page(entry: Entry) -> str:
    body = textwrap.indent(entry.doc, "    ")
    return f"Help on {entry.kind} {entry.name}:\n\n{entry.name}{entry.signature}\n{body}\n"


def _topics() -> list[tuple[str, str]]:
    """(topic, text) pairs of the language reference, sorted by topic."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return [(name, clean_doc(text)) for name, text in sorted(topics.items())]


class _PageText(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def _other_pages(stdlib: Path) -> Iterator[str]:
    """IDLE's manual and the licence, if the installation has them, and the Zen of Python."""
    manual = stdlib / "idlelib" / "help.html"
    if manual.exists():
        page = _PageText()
        page.feed(manual.read_text(encoding="utf-8"))
        yield clean_doc("".join(page.parts))
    licence = stdlib / "LICENSE.txt"
    if licence.exists():
        yield clean_doc(licence.read_text(encoding="utf-8"))
    yield zen_of_python(stdlib)


def zen_of_python(stdlib: Path) -> str:
    """The text that `import this` prints, read from the source because importing it prints."""
    tree = ast.parse((stdlib / "this.py").read_text(encoding="utf-8"))
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    cipher = next(value for value in constants if isinstance(value, str))
    letters = "abcdefghijklmnopqrstuvwxyz"
    rotated = letters[13:] + letters[:13]
    return cipher.translate(str.maketrans(letters + letters.upper(), rotated + rotated.upper()))


def _pieces(text: str) -> Iterator[str]:
    """Split a long page at blank lines into pieces of at most _MAX_PIECE_CHARS, unless one paragraph is longer."""
    piece = ""
    for paragraph in text.split("\n\n"):
        if piece and len(piece) + len(paragraph) > _MAX_PIECE_CHARS:
            yield piece
            piece = ""
        piece += f"\n\n{paragraph}" if piece else paragraph
    if piece.strip():
        yield piece


def _summary(doc: str) -> str:
    """The first paragraph as one line, and the second if the first is only a title; cut at the end of a sentence."""
    paragraphs = [" ".join(part.split()) for part in doc.split("\n\n") if part.strip() and ">>>" not in part]
    if not paragraphs or re.search(r"[+=|*-]{4}", paragraphs[0]):
        return ""
    text = paragraphs[0]
    if len(text) < 90 and len(paragraphs) > 1 and not re.search(r"[+=|*-]{4}|  ", paragraphs[1]):
        text = f"{text.rstrip('.:')}.\n\n{paragraphs[1]}"
    if len(text) > _MAX_ANSWER_CHARS:
        cut = text.rfind(". ", 0, _MAX_ANSWER_CHARS)
        text = text[: cut + 1] if cut > 0 else ""
    return text


_DOC_QUESTIONS = (
    "What does {name} do?",
    "What does {name}() do?",
    "Explain {name}",
    "Explain {name}.",
    "What is {name}?",
    "Tell me about {name}.",
    "what is {name} for?",
    "Can you explain {name} to me?",
    "How do I use {name}?",
    "What is {name} in Python?",
)
_SIGNATURE_QUESTIONS = (
    "Write the signature of {name}.",
    "What is the signature of {name}?",
    "What arguments does {name} take?",
    "How do I call {name}?",
)
_TOPIC_QUESTIONS = (
    "Explain {name} in Python.",
    "What can you tell me about {name}?",
    "Tell me about {name} in Python.",
)


def _chats(entries: list[Entry], topics: list[tuple[str, str]], rng: random.Random) -> list[list[ChatTurn]]:
    """Questions and answers about everything; some chats begin with a system message or a greeting."""
    chats = [_chat(*pair, rng) for entry in entries for pair in _entry_questions(entry, rng)]
    chats += [_chat(*pair, rng) for name, text in topics for pair in _topic_questions(name, text)]
    for question, reply in SMALL_TALK * _SMALL_TALK_REPEATS:
        chats.append(_chat(rng.choice((question, question.rstrip("?!."), question.lower())), reply, rng))
    rng.shuffle(chats)
    return chats


def _entry_questions(entry: Entry, rng: random.Random) -> Iterator[tuple[str, str]]:
    summary = _summary(entry.doc)
    if len(summary) < 12 or summary.startswith(f"{entry.name}("):  # "dict(mapping) -> new dictionary …"
        return
    call, popular = f"{entry.name}{entry.signature}", entry.module in _POPULAR
    answer = f"`{call}`\n\n{summary}" if entry.signature and len(call) < 160 else summary
    for question in rng.sample(_DOC_QUESTIONS, 4 if popular else 2):
        yield question.format(name=entry.name), answer
    if entry.signature and len(call) < 160 and rng.random() < (1.0 if popular else 0.5):
        yield rng.choice(_SIGNATURE_QUESTIONS).format(name=entry.name), f"```python\n{call}\n```"
    if popular and entry.kind == "function" and 25 < len(summary) < 160 and "\n" not in summary:
        yield f"Which function does this: {summary}", f"That is `{entry.name}`."


def _topic_questions(name: str, text: str) -> Iterator[tuple[str, str]]:
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")[1:]]
    prose = [part for part in paragraphs if part.endswith(".") and len(part) > 80 and "::=" not in part]
    for question in _TOPIC_QUESTIONS if prose else ():
        yield question.format(name=name.lower().replace("_", " ")), prose[0][: 2 * _MAX_ANSWER_CHARS]


def _chat(question: str, answer: str, rng: random.Random) -> list[ChatTurn]:
    messages: list[ChatTurn] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    if rng.random() < 0.12:
        greeting, reply = rng.choice(GREETINGS)
        messages.append({"role": "user", "content": greeting})
        messages.append({"role": "assistant", "content": reply})
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": answer})
    return messages
