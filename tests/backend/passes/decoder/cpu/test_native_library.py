"""The native kernels are compiled once, kept in a private directory, and optional."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.backend.passes.decoder.cpu import native_library
from penstock.backend.passes.decoder.cpu.native_library import (
    LibraryUnavailableError,
    cache_dir,
    find_compiler,
    load_library,
    open_library,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the library. It is compiled in the user's cache, where other tests use it too."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("this machine has no C++ compiler")
    directory = tmp_path_factory.mktemp("kernels") / "private"
    directory.mkdir(mode=0o700)
    try:
        library = open_library(cache_dir(), compiler)
    except LibraryUnavailableError as error:
        pytest.skip(f"this machine has no native kernels: {error}")
    shutil.copy2(library._name, directory)
    return directory


@pytest.fixture
def compiled(original: Path, tmp_path: Path) -> Path:
    """A copy of `original` for one test."""
    return shutil.copytree(original, tmp_path / "private")


def test_kept_library_is_loaded_without_a_compiler(compiled: Path) -> None:
    assert open_library(compiled, None).ps_abi() == native_library.ABI
    assert [path.suffix for path in compiled.iterdir()] == [".so"]


def test_changed_source_file_changes_the_library_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = shutil.copytree(native_library.SOURCE.parent, tmp_path / "kernels")
    monkeypatch.setattr(native_library, "SOURCE", kernels / "cpu.cpp")
    found = {native_library._fingerprint(()), native_library._fingerprint(native_library.AVX2_FLAGS)}
    ours = [path for path in kernels.iterdir() if path.suffix in (".cpp", ".h")]
    assert len(ours) > 1
    for path in ours:
        path.write_text(path.read_text() + "\n")
        found.add(native_library._fingerprint(()))
    assert len(found) == 2 + len(ours)


def test_directory_and_library_are_private(compiled: Path) -> None:
    assert compiled.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in compiled.iterdir())


@pytest.mark.parametrize("writable", ["directory", "library"])
def test_library_that_others_may_write_is_refused(writable: str, compiled: Path) -> None:
    path = compiled if writable == "directory" else next(compiled.iterdir())
    path.chmod(0o722)
    with pytest.raises(LibraryUnavailableError, match=r"can be written by others|other users can change"):
        open_library(compiled, None)


def test_directory_above_that_others_may_write_is_refused(compiled: Path) -> None:
    compiled.parent.chmod(0o777)
    with pytest.raises(LibraryUnavailableError, match=f"other users can change the directory {compiled.parent}, which"):
        open_library(compiled, None)


def test_file_that_is_no_library_is_refused(compiled: Path) -> None:
    next(compiled.iterdir()).write_bytes(b"not an ELF file")
    with pytest.raises(LibraryUnavailableError):
        open_library(compiled, None)


def test_missing_compiler_is_reported_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(LibraryUnavailableError, match=r"no C\+\+ compiler: install g\+\+"):
        open_library(tmp_path / "private", None)


def test_missing_sources_make_the_library_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "SOURCE", tmp_path / "missing.cpp")
    with pytest.raises(LibraryUnavailableError, match=r"missing\.cpp"):
        open_library(tmp_path / "private", None)


def test_failed_compilation_leaves_nothing_behind(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'cpu.cpp:1:1: error: this CPU will not do' >&2\nexit 1\n")
    compiler.chmod(0o700)
    with pytest.raises(LibraryUnavailableError, match="this CPU will not do"):
        open_library(tmp_path / "private", str(compiler))
    assert list((tmp_path / "private").iterdir()) == []


@pytest.fixture
def fresh_load() -> Iterator[None]:
    """`load_library` looks again, now and after the test."""
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.fixture
def copying_compiler(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that takes no time: it copies the library compiled for all tests."""
    library = next(original.iterdir())
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"#!/bin/sh\nwhile [ $# -gt 0 ]; do if [ $1 = -o ]; then exec cp '{library}' \"$2\"; fi; shift; done\nexit 1\n"
    )
    compiler.chmod(0o700)
    monkeypatch.setattr(native_library, "find_compiler", lambda: str(compiler))


@pytest.mark.usefixtures("fresh_load")
def test_machine_without_a_compiler_gets_one_warning_and_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_library, "find_compiler", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert load_library() is None
        assert load_library() is None
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("fresh_load", "copying_compiler")
def test_compilation_is_announced_and_timed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level(logging.INFO):
        assert load_library() is not None
        load_library.cache_clear()
        assert load_library() is not None
    compiling, compiled = caplog.messages
    assert compiling.startswith("Compiling the CPU kernels with ")
    assert re.fullmatch(r"Compiled the CPU kernels in \d+\.\d s", compiled)


def below_a_file(tmp_path: Path) -> tuple[Path, str]:
    (tmp_path / "file").touch()
    return tmp_path / "file", "Not a directory"


def open_to_others(tmp_path: Path) -> tuple[Path, str]:
    (tmp_path / "shared" / "penstock").mkdir(parents=True)
    (tmp_path / "shared" / "penstock").chmod(0o777)
    return tmp_path / "shared", "other users can change the directory"


@pytest.mark.usefixtures("fresh_load", "copying_compiler")
@pytest.mark.parametrize("make_cache", [below_a_file, open_to_others])
def test_unusable_cache_directory_compiles_into_a_temporary_one(
    make_cache: Callable[[Path], tuple[Path, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache_home, reason = make_cache(tmp_path)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    used: list[Path] = []
    modes: list[int] = []
    plain_open = native_library.open_library

    def watched_open(directory: Path, compiler: str | None) -> Any:
        used.append(directory)
        library = plain_open(directory, compiler)
        modes.append(directory.stat().st_mode & 0o777)
        return library

    monkeypatch.setattr(native_library, "open_library", watched_open)
    with caplog.at_level(logging.WARNING):
        library = load_library()
    assert library is not None
    assert library.ps_abi() == native_library.ABI
    assert [directory.parent for directory in used] == [cache_home, temporary]
    assert modes == [0o700]
    assert list(temporary.iterdir()) == []
    (warning,) = caplog.messages
    assert reason in warning
    assert str(cache_home) in warning
    assert "set XDG_CACHE_HOME to a directory" in warning


@pytest.mark.usefixtures("fresh_load", "copying_compiler")
def test_user_without_a_home_gets_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with caplog.at_level(logging.WARNING):
        assert load_library() is not None
    assert "no home directory" in caplog.text


@pytest.mark.usefixtures("fresh_load")
def test_unusable_cache_without_a_compiler_names_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(below_a_file(tmp_path)[0]))
    monkeypatch.setattr(native_library, "find_compiler", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert load_library() is None
    (warning,) = caplog.messages
    assert "no C++ compiler" in warning


def test_cache_follows_xdg_and_ignores_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "penstock"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path.home() / ".cache" / "penstock"
