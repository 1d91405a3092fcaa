"""Name, signature, docstring and source of everything that the standard library documents.

Sources are parsed, not imported. Only the compiled modules named below are imported, for their docstrings.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_SKIPPED_PARTS = frozenset(
    """
    site-packages test tests idle_test __pycache__ encodings pydoc_data lib2to3 distutils turtledemo ensurepip idlelib
    lib-dynload __phello__ tkinter turtle msilib curses ctypes dummy sax dom expatbuilder minidom xmlrpc wsgiref smtpd
    mailbox nntplib imaplib asyncore asynchat pydoc mock importlib multiprocessing pickletools aifc sunau
    """.split()  # noqa: SIM905  # a table of words
)
"""Parts of paths that are skipped: tests, tables, and large modules that users rarely ask about."""

_COMPILED_MODULES = """
    array atexit binascii builtins cmath errno fcntl gc grp itertools marshal math mmap posix pwd pyexpat resource
    select sys syslog termios time unicodedata zlib _bisect _csv _datetime _functools _heapq _io _json _operator
    _random _socket _sqlite3 _struct _thread _weakref
""".split()  # noqa: SIM905  # a table of words
"""Modules without Python source, imported for their docstrings. Importing them has no side effects."""

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
_PUBLIC_CLASSES = {"random.Random": "random"}
"""Classes whose methods are also functions of the module."""

_MAX_SOURCE_CHARS = 1000


Kind = Literal["module", "class", "function", "method"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One documented object. name is dotted and public; signature is "" if there is none.

    source is the text of a short function or class, or the beginning of a module, or "".
    """

    module: str
    name: str
    kind: Kind
    signature: str
    doc: str
    source: str = ""


def read_entries(stdlib: Path) -> list[Entry]:
    """All entries of the standard library at `stdlib` and of this interpreter's compiled modules, in a fixed order."""
    by_name: dict[str, Entry] = {}
    # Compiled modules come first and win, because users see their docstrings.
    for entry in (*_compiled_entries(), *_source_entries(stdlib)):
        by_name.setdefault(entry.name, entry)
    return list(by_name.values())


def _source_entries(stdlib: Path) -> Iterator[Entry]:
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if any(part in _SKIPPED_PARTS or part.startswith(("config-", "_sysconfigdata")) for part in parts):
            continue
        dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        public = _PUBLIC_NAMES.get(dotted, dotted)
        if public.startswith("_"):
            continue
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        if doc := clean_doc(ast.get_docstring(tree)):
            head = text[:_MAX_SOURCE_CHARS].rpartition("\n\n")[0]
            yield Entry(public, public, "module", "", doc, head)
        yield from _members(tree, public, _exporting_package(path, parts) or public, text.splitlines())


def _exporting_package(path: Path, parts: tuple[str, ...]) -> str:
    """The package that star-imports this module in its __init__, else "": asyncio.tasks.sleep is asyncio.sleep."""
    init = path.parent / "__init__.py"
    if len(parts) < 2 or parts[-1] == "__init__" or not init.exists():
        return ""
    return ".".join(parts[:-1]) if f"from .{parts[-1]} import *" in init.read_text(encoding="utf-8") else ""


def _members(tree: ast.Module | ast.ClassDef, module: str, prefix: str, lines: list[str]) -> Iterator[Entry]:
    """Classes, functions and methods with a docstring. Private ones have their source only."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = f"{prefix}.{node.name}"
        if doc := clean_doc(ast.get_docstring(node)):
            public = "._" not in name
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(source) > _MAX_SOURCE_CHARS or module == "decimal":  # its Python version repeats the docstrings
                source = ""
            signature = _class_signature(node) if isinstance(node, ast.ClassDef) else _signature(node.args)
            yield Entry(module, name, _kind(node, tree), signature if public else "", doc if public else "", source)
        if isinstance(node, ast.ClassDef):
            yield from _members(node, module, _PUBLIC_CLASSES.get(name, name), lines)


def _kind(node: ast.stmt, parent: ast.Module | ast.ClassDef) -> Kind:
    if isinstance(node, ast.ClassDef):
        return "class"
    return "method" if isinstance(parent, ast.ClassDef) else "function"


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
        except ImportError:  # this interpreter was built without it
            continue
        public = _PUBLIC_NAMES.get(name, name.removeprefix("_"))
        if doc := clean_doc(module.__doc__):
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
    doc, signature = clean_doc(inspect.cleandoc(value.__doc__)), getattr(value, "__text_signature__", None) or ""
    signature = re.sub(r"\(\$?(self|module|type|cls)(, /)?(, |(?=\)))", "(", signature)
    short = name.rsplit(".", 1)[-1]
    heading = rf"(?:[A-Z]+\.)?{re.escape(short)}(\([^\n]*?\))( -> [^\n]*| --[^\n]*)?\n+"
    if not signature and (match := re.match(heading, doc)):
        signature, doc = match.group(1), doc[match.end() :].strip()
    if doc:
        yield Entry(module, name, "class" if isinstance(value, type) else "function", signature, doc)


def clean_doc(doc: str | None) -> str:
    """Remove tabs, trailing blanks and runs of empty lines; "" for None."""
    if not doc:
        return ""
    lines = [line.rstrip() for line in doc.expandtabs().strip().splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
