"""The native kernels are compiled once, kept in a private place, and never needed."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from penstock.backend.passes.decoder.cpu import native_library
from penstock.backend.passes.decoder.cpu.native_library import (
    LibraryUnavailableError,
    cache_dir,
    find_compiler,
    load_library,
    open_library,
)
from penstock.backend.passes.decoder.cpu.thread_counts import configure_torch_threads, num_usable_cores


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the library in it, compiled once for all tests."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("this machine has no C++ compiler")
    directory = tmp_path_factory.mktemp("kernels") / "private"
    try:
        open_library(directory, compiler)
    except LibraryUnavailableError as error:
        pytest.skip(f"this machine has no native kernels: {error}")
    return directory


@pytest.fixture
def compiled(original: Path, tmp_path: Path) -> Path:
    """A copy of `original` for one test."""
    return shutil.copytree(original, tmp_path / "private")


def test_what_was_compiled_once_is_used_without_a_compiler(compiled: Path) -> None:
    assert open_library(compiled, None).ps_abi() == native_library.ABI
    assert [path.suffix for path in compiled.iterdir()] == [".so"]


def test_a_change_in_any_source_file_means_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = shutil.copytree(native_library.SOURCE.parent, tmp_path / "kernels")
    monkeypatch.setattr(native_library, "SOURCE", kernels / "cpu.cpp")
    found = {native_library._fingerprint(()), native_library._fingerprint(native_library.AVX2_FLAGS)}
    ours = [path for path in kernels.iterdir() if path.suffix in (".cpp", ".h")]
    for path in ours:
        path.write_text(path.read_text() + "\n")
        found.add(native_library._fingerprint(()))
    assert len(found) == 2 + len(ours)


def test_the_directory_is_private(compiled: Path) -> None:
    assert compiled.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in compiled.iterdir())


@pytest.mark.parametrize("writable", ["directory", "library"])
def test_a_library_that_others_may_write_is_refused(writable: str, compiled: Path) -> None:
    path = compiled if writable == "directory" else next(compiled.iterdir())
    path.chmod(0o722)
    with pytest.raises(LibraryUnavailableError, match="not ours alone"):
        open_library(compiled, None)


def test_a_file_that_is_no_library_is_refused(compiled: Path) -> None:
    next(compiled.iterdir()).write_bytes(b"not an ELF file")
    with pytest.raises(LibraryUnavailableError):
        open_library(compiled, None)


def test_no_compiler_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(LibraryUnavailableError, match=r"no C\+\+ compiler"):
        open_library(tmp_path / "private", None)


def test_a_failed_compilation_leaves_nothing_behind(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'cpu.cpp:1:1: error: this CPU will not do' >&2\nexit 1\n")
    compiler.chmod(0o700)
    with pytest.raises(LibraryUnavailableError, match="this CPU will not do"):
        open_library(tmp_path / "private", str(compiler))
    assert list((tmp_path / "private").iterdir()) == []


def test_without_kernels_there_is_one_warning_and_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_library, "find_compiler", lambda: None)
    load_library.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert load_library() is None
        assert load_library() is None
    load_library.cache_clear()
    assert len(caplog.records) == 1


def test_the_cache_follows_xdg_and_ignores_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "penstock"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path.home() / ".cache" / "penstock"


@pytest.mark.parametrize(
    ("content", "quota"), [("max 100000", None), ("150000 100000", 2), ("1000 100000", 1), ("?", None)]
)
def test_cores_are_those_of_the_affinity_within_the_quota(content: str, quota: int | None, tmp_path: Path) -> None:
    cpu_max = tmp_path / "cpu.max"
    cpu_max.write_text(content)
    own = len(os.sched_getaffinity(0))
    assert num_usable_cores(cpu_max) == (own if quota is None else min(own, quota))
    assert num_usable_cores(tmp_path / "missing") == own


def test_threads_are_told_to_sleep_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    configure_torch_threads()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert int(os.environ["OMP_NUM_THREADS"]) == num_usable_cores()
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    configure_torch_threads()
    assert "OMP_WAIT_POLICY" not in os.environ
