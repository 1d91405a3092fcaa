"""Panics of native libraries, and that nothing calls the tokenizers library around its wrapper."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.process.logs import set_up_logging
from penstock.process.native_libraries import GuardedTokenizer, LibraryError, guarded, panics_unseen

ROOT = Path(__file__).parents[2]
PRODUCT = ("penstock", "frontend", "backend", "shm")
WRAPPER = "penstock/process/native_libraries.py"


def imports_library(node: ast.AST) -> bool:
    """Whether code that runs imports it. What only a type checker reads is left out."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return any(map(imports_library, node.orelse))
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "tokenizers" for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] == "tokenizers"
    return any(map(imports_library, ast.iter_child_nodes(node)))


def test_only_the_wrapper_imports_the_tokenizers_library() -> None:
    paths = [path for wing in PRODUCT for path in (ROOT / wing).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in paths if imports_library(ast.parse(path.read_text("utf-8")))}
    assert found == {WRAPPER}


def test_panic_is_an_error_of_one_line_and_can_be_kept_off_stderr(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE()).save(str(path))
    damaged = '"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////"}'
    path.write_text(path.read_text().replace('"normalizer": null', damaged))
    with panics_unseen(), pytest.raises(LibraryError, match="Cannot parse precompiled_charsmap"):
        GuardedTokenizer.from_file(path)
    assert capfd.readouterr().err == ""
    path.write_text("{")
    with pytest.raises(LibraryError, match="EOF while parsing"):
        GuardedTokenizer.from_file(path)


def test_other_errors_are_passed_on() -> None:
    with pytest.raises(KeyError):
        guarded({}.__getitem__)("x")
    with pytest.raises(KeyboardInterrupt):
        guarded(interrupt)()
    assert guarded(pre_tokenizers.Whitespace)() is not None


def interrupt() -> None:
    raise KeyboardInterrupt


def test_traceback_is_folded_into_its_log_line(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        handler = set_up_logging("INFO", as_json=False, fd=file.fileno())
        try:
            raise ValueError("a\nb\x1b[2J" + "x" * 9999)
        except ValueError:
            logging.getLogger("penstock.test").exception("request\n7 failed")
        logging.getLogger().removeHandler(handler)
        handler.close()
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert " ERROR penstock.test: request | 7 failed | Traceback (most recent call last): test_native" in line
    assert r" test_traceback_is_folded_into_its_log_line: ValueError: a b\x1b[2Jxxx" in line
    assert len(line) < 1000
