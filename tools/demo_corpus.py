"""The text the demo model learns from: what every CPython installation carries, read the same way each time.

Four kinds of documents: reference pages (name, signature, docstring), the language reference of `pydoc_data.topics`,
functions of the standard library's source, and chats made from the same docstrings. Modules in HELD_OUT give no
training document of any kind; they give the held-out set. Nothing is imported but the compiled modules named below.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal, TypedDict

from tools.demo_chats import GREETINGS, SMALL_TALK, SYSTEM_PROMPTS

HELD_OUT = frozenset(
    "cmd colorsys fileinput filecmp getopt gettext heapq netrc poplib queue sched shlex statistics telnetlib textwrap "
    "timeit uuid wave webbrowser xdrlib zipapp".split()
)
"""Top-level modules kept from training: large enough to measure on, seldom asked for in a demonstration."""

_SKIPPED_PARTS = frozenset(
    "site-packages test tests idle_test __pycache__ encodings pydoc_data lib2to3 distutils turtledemo ensurepip "
    "lib-dynload __phello__ idlelib tix.py tix msilib".split()
)
_COMPILED_MODULES = (
    "array atexit binascii builtins cmath errno fcntl gc grp itertools marshal math mmap posix pwd pyexpat resource "
    "select sys syslog termios time unicodedata zlib _bisect _csv _datetime _functools _heapq _io _json _operator "
    "_random _socket _sqlite3 _struct _thread _weakref"
).split()
_PUBLIC_NAMES = {
    "posixpath": "os.path",
    "genericpath": "os.path",
    "posix": "os",
    "_collections_abc": "collections.abc",
    "_pydecimal": "decimal",
    "_pyio": "io",
    "_strptime": "time",
    "_weakrefset": "weakref",
}
_MAX_SOURCE_CHARS = 2600
_MAX_ANSWER_CHARS = 600


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One documented thing. name is dotted and public, signature is "" for modules and for what has none."""

    module: str
    name: str
    kind: Literal["module", "class", "function", "method"]
    signature: str
    doc: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in a fixed order. Each text is a whole document; each chat is a whole conversation."""

    texts: list[str]
    chats: list[list[Message]]
    held_out_texts: list[str]


def build_corpus(seed: int) -> Corpus:
    """Reads the running interpreter's standard library; the same interpreter and seed give the same corpus."""
    rng = random.Random(seed)  # noqa: S311
    stdlib = Path(sysconfig.get_path("stdlib"))
    entries = _distinct([*_compiled_entries(), *_source_entries(stdlib)])
    training = [entry for entry in entries if entry.module.split(".")[0] not in HELD_OUT]
    held_out = [entry for entry in entries if entry.module.split(".")[0] in HELD_OUT]
    topics = _topics()
    texts = [_reference_page(entry) for entry in training if entry.doc]
    texts += [entry.source for entry in training if entry.source]
    texts += [piece for _, text in topics for piece in _pieces(text)]
    texts += [piece for text in _other_pages(stdlib) for piece in _pieces(text)]
    return Corpus(
        texts=list(dict.fromkeys(texts)),
        chats=_chats(training, topics, rng),
        held_out_texts=list(dict.fromkeys(_reference_page(entry) for entry in held_out if entry.doc)),
    )


def _distinct(entries: list[Entry]) -> list[Entry]:
    """The first entry of each name: compiled modules come first, for their docstrings are the ones users see."""
    by_name: dict[str, Entry] = {}
    for entry in entries:
        by_name.setdefault(entry.name, entry)
    return list(by_name.values())


def _source_entries(stdlib: Path) -> Iterator[Entry]:
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if any(part in _SKIPPED_PARTS or part.startswith(("config-", "_sysconfigdata")) for part in parts):
            continue
        dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        public = _PUBLIC_NAMES.get(dotted, dotted)
        if public.startswith("_"):
            continue
        if doc := _clean_doc(ast.get_docstring(tree)):
            yield Entry(public, public, "module", "", doc)
        yield from _members(tree, public, _exporting_package(path, parts) or public, text.splitlines())


def _exporting_package(path: Path, parts: tuple[str, ...]) -> str:
    """asyncio.tasks.sleep is known as asyncio.sleep: the package's name where its __init__ star-imports the module."""
    init = path.parent / "__init__.py"
    if len(parts) < 2 or parts[-1] == "__init__" or not init.exists():
        return ""
    return ".".join(parts[:-1]) if f"from .{parts[-1]} import *" in init.read_text(encoding="utf-8") else ""


def _members(tree: ast.Module | ast.ClassDef, module: str, prefix: str, lines: list[str]) -> Iterator[Entry]:
    in_class = isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name, doc = f"{prefix}.{node.name}", _clean_doc(ast.get_docstring(node))
        if isinstance(node, ast.ClassDef):
            if doc and not node.name.startswith("_"):
                yield Entry(module, name, "class", _class_signature(node), doc)
            yield from _members(node, module, name, lines)
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) if doc or not in_class else ""
        if len(source) > _MAX_SOURCE_CHARS:
            source = ""
        if not doc and not source:
            continue
        public = not node.name.startswith("_") and "._" not in name
        yield Entry(
            module,
            name,
            "method" if in_class else "function",
            _signature(node.args) if public and doc else "",
            doc if public else "",
            source,
        )


def _signature(args: ast.arguments) -> str:
    text = ast.unparse(args)
    return f"({re.sub(r'^(self|cls)(, (/, )?|$)', '', text)})"


def _class_signature(node: ast.ClassDef) -> str:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _signature(item.args)
    return ""


def _compiled_entries() -> Iterator[Entry]:
    for name in _COMPILED_MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # built without it, as some platforms are
            continue
        public = _PUBLIC_NAMES.get(name, name.removeprefix("_"))
        if doc := _clean_doc(module.__doc__):
            yield Entry(public, public, "module", "", doc)
        prefix = "" if name == "builtins" else f"{public}."
        for member, value in sorted(vars(module).items()):
            if member.startswith("_"):
                continue
            yield from _compiled_member(public, f"{prefix}{member}", value)
            if isinstance(value, type):
                for attribute, method in sorted(vars(value).items()):
                    if not attribute.startswith("_"):
                        yield from _compiled_member(public, f"{prefix}{member}.{attribute}", method)


def _compiled_member(module: str, name: str, value: object) -> Iterator[Entry]:
    if not (callable(value) or inspect.ismethoddescriptor(value)) or not isinstance(value.__doc__, str):
        return
    doc, signature = _clean_doc(inspect.cleandoc(value.__doc__)), getattr(value, "__text_signature__", None) or ""
    signature = re.sub(r"\(\$?(self|module|type|cls)(, /)?(, |(?=\)))", "(", signature)
    short = name.rsplit(".", 1)[-1]
    if not signature and (match := re.match(rf"{re.escape(short)}(\([^\n]*?\))( -> [^\n]*| --[^\n]*)?\n+", doc)):
        signature, doc = match.group(1), doc[match.end() :].strip()
    if doc:
        yield Entry(module, name, "class" if isinstance(value, type) else "function", signature, doc)


def _clean_doc(doc: str | None) -> str:
    if not doc:
        return ""
    lines = [line.rstrip() for line in doc.expandtabs().strip().splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _reference_page(entry: Entry) -> str:
    body = textwrap.indent(entry.doc, "    ")
    return f"Help on {entry.kind} {entry.name}:\n\n{entry.name}{entry.signature}\n{body}\n"


def _topics() -> list[tuple[str, str]]:
    """(topic, text) of the language reference, in the order of the topics' names."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return [(name, _clean_doc(text)) for name, text in sorted(topics.items())]


class _PageText(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def _other_pages(stdlib: Path) -> Iterator[str]:
    """IDLE's manual, the licence and the Zen of Python, where the installation has them."""
    manual = stdlib / "idlelib" / "help.html"
    if manual.exists():
        page = _PageText()
        page.feed(manual.read_text(encoding="utf-8"))
        yield _clean_doc("".join(page.parts))
    licence = stdlib / "LICENSE.txt"
    if licence.exists():
        yield _clean_doc(licence.read_text(encoding="utf-8"))
    yield zen_of_python(stdlib)


def zen_of_python(stdlib: Path) -> str:
    """The text that `import this` prints; read from the source, for importing it would print."""
    tree = ast.parse((stdlib / "this.py").read_text(encoding="utf-8"))
    cipher = next(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    letters = "abcdefghijklmnopqrstuvwxyz"
    rotated = letters[13:] + letters[:13]
    return cipher.translate(str.maketrans(letters + letters.upper(), rotated + rotated.upper()))


def _pieces(text: str, max_chars: int = 6000) -> Iterator[str]:
    """Cuts a long page at blank lines, so that a piece is at most max_chars and begins with a paragraph."""
    piece = ""
    for paragraph in text.split("\n\n"):
        if piece and len(piece) + len(paragraph) > max_chars:
            yield piece
            piece = ""
        piece += f"\n\n{paragraph}" if piece else paragraph
    if piece.strip():
        yield piece


def _summary(doc: str) -> str:
    """The first paragraph as one line, with the second where the first is a mere title; cut at a sentence's end."""
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
_TOPIC_QUESTIONS = ("Explain {name} in Python.", "What can you tell me about {name}?", "Tell me about {name} in Python.")


def _chats(entries: list[Entry], topics: list[tuple[str, str]], rng: random.Random) -> list[list[Message]]:
    """Each entry is asked about three times in different words; a part of the chats has a system message or turns before."""
    chats: list[list[Message]] = []
    for entry in entries:
        summary = _summary(entry.doc)
        if len(summary) < 12:
            continue
        call = f"{entry.name}{entry.signature}"
        answer = f"`{call}`\n\n{summary}" if entry.signature and len(call) < 160 else summary
        for question in rng.sample(_DOC_QUESTIONS, 3 if len(entry.doc) > 60 else 2):
            chats.append(_chat(question.format(name=entry.name), answer, rng))
        if entry.signature and len(call) < 200:
            question = rng.choice(_SIGNATURE_QUESTIONS).format(name=entry.name)
            chats.append(_chat(question, f"```python\n{call}\n```", rng))
        if entry.kind == "function" and 25 < len(summary) < 160 and "\n" not in summary:
            chats.append(_chat(f"Which function does this: {summary}", f"That is `{entry.name}`.", rng))
        if entry.source and entry.kind == "function" and len(entry.source) < 1200:
            chats.append(_chat(f"Show me the code of {entry.name}.", f"```python\n{entry.source}\n```", rng))
    for name, text in topics:
        paragraphs = [" ".join(part.split()) for part in text.split("\n\n")[1:]]
        prose = [part for part in paragraphs if part.endswith(".") and len(part) > 80 and "::=" not in part]
        for question in _TOPIC_QUESTIONS if prose else ():
            chats.append(_chat(question.format(name=name.lower().replace("_", " ")), prose[0][:1200], rng))
    for question, reply in SMALL_TALK * 12:
        chats.append(_chat(rng.choice((question, question.rstrip("?!."), question.lower())), reply, rng))
    rng.shuffle(chats)
    return chats


def _chat(question: str, answer: str, rng: random.Random) -> list[Message]:
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    if rng.random() < 0.12:
        greeting, reply = rng.choice(GREETINGS)
        messages.append({"role": "user", "content": greeting})
        messages.append({"role": "assistant", "content": reply})
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": answer})
    return messages
