"""House rules: lengths of files, functions and decisions, the width of classes, and docs that name files that exist."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[1]
FOLDERS = ("penstock", "frontend", "backend", "shm", "tools", "tests", "docs")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PUBLIC_METHODS = 20
MAX_DECISION_WORDS = 80

_SOURCE_PATH = re.compile(
    r"`((?:penstock|frontend|backend|shm|tools|tests)/[\w/.-]+\.(?:py|cu|cuh|h|cpp|c|html|js|css))`"
)
_TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
_TEST_NAME = re.compile(r"`(test_\w+)`")
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")


@cache
def sources(*suffixes: str) -> tuple[str, ...]:
    paths = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    return tuple(sorted(str(path.relative_to(ROOT)) for path in paths if path.suffix in suffixes))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def num_lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def docstrings(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """The docstrings of a function and of the attributes that it sets."""
    return [node for node in ast.walk(function) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in function.decorator_list)


def test_no_source_file_is_too_long() -> None:
    names = sources(".py", ".cu", ".cuh", ".h", ".cpp", ".c", ".js", ".css")
    lengths = {name: read(name).count("\n") for name in names if "/vendor/" not in name and "/manual/" not in name}
    assert len(lengths) > 300
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def num_public_methods(node: ast.ClassDef) -> int:
    functions = (item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
    return sum(not item.name.startswith("_") and not is_property(item) for item in functions)


def test_no_function_is_longer_than_a_screen_and_no_class_has_too_many_public_methods() -> None:
    too_long, too_wide = {}, {}
    for name in sources(".py"):
        for node in ast.walk(ast.parse(read(name))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and num_lines(node) > MAX_FUNCTION_LINES:
                length = num_lines(node) - sum(map(num_lines, docstrings(node)))
                if length > MAX_FUNCTION_LINES:
                    too_long[f"{name}:{node.name}"] = length
            # In tests are state machines, and fakes of wide interfaces.
            is_product = isinstance(node, ast.ClassDef) and not name.startswith("tests/")
            if is_product and (number := num_public_methods(node)) > MAX_PUBLIC_METHODS:
                too_wide[f"{name}:{node.name}"] = number
    assert too_long == {}
    assert too_wide == {}


def test_packages_say_what_lives_there() -> None:
    packages = {Path(name).parent for name in sources(".py") if not name.startswith(("tests/", "docs/"))}
    assert len(packages) > 80
    without_docstring = [
        str(package)
        for package in packages
        if not (ROOT / package / "__init__.py").is_file()
        or not ast.get_docstring(ast.parse(read(f"{package}/__init__.py")))
    ]
    assert without_docstring == []


@pytest.mark.parametrize("page", sources(".md"))
def test_a_page_names_files_that_exist(page: str) -> None:
    text = read(page)
    named = set(_SOURCE_PATH.findall(text))
    assert {path for path in named if not (ROOT / path).is_file()} == set()
    links = set(_LINK.findall(text))
    assert {link for link in links if not ((ROOT / page).parent / link).exists()} == set()


def test_no_decision_is_longer_than_a_paragraph() -> None:
    too_long = {}
    for page in (name for name in sources(".md") if name.startswith("docs/decisions/")):
        for entry in re.split(r"^## ", read(page), flags=re.MULTILINE)[1:]:
            num_words = len([word for word in entry.split() if re.search(r"\w", word)])
            if num_words > MAX_DECISION_WORDS:
                too_long[f"{page}: {entry.splitlines()[0]}"] = num_words
    assert too_long == {}


def test_each_promise_of_reliability_names_its_test_and_docs_name_tests_that_exist() -> None:
    promises = re.findall(
        r"^\| (?!event \|)[^|]+\|[^|]+\|([^|]*)\|$",
        read("docs/reliability.md").partition("Not promised")[0],
        re.MULTILINE,
    )
    assert len(promises) > 10
    assert all(_TEST_NAME.search(tests) for tests in promises)
    defined = {name for path in sources(".py") if path.startswith("tests/") for name in _TEST.findall(read(path))}
    named = {(page, name) for page in sources(".md") for name in _TEST_NAME.findall(read(page))}
    assert {(page, name) for page, name in named if name not in defined} == set()


def test_of_the_laboratory_the_wheel_holds_only_the_contract_suite() -> None:
    find = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]["packages"]["find"]
    packages = setuptools.find_packages(str(ROOT), exclude=find["exclude"], include=find["include"])
    assert {"penstock.serve.upgrade", "penstock.backend.engine", "penstock.shm.link"} <= set(packages)
    assert [name for name in packages if ".tools" in name] == ["penstock.tools.forward_pass_contract"]
