"""The native kernels are compiled once, kept in a directory that only their owner can write, and optional."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.backend.passes.cpu.library import native_library
from penstock.backend.passes.cpu.library.cpu_paths import KernelBuild, machine_builds, read_cpu_info, supported_paths
from penstock.backend.passes.cpu.library.native_library import (
    LibraryUnavailableError,
    compile_builds,
    directory_name,
    open_build,
    open_library,
)
from penstock.backend.passes.cpu.path_choice import load_kernels
from penstock.process.cache_directory import cache_directory
from tests.users import NOBODY, needs_root


@pytest.fixture(scope="module")
def build() -> KernelBuild:
    """The build that this machine's CPU runs."""
    paths = supported_paths(read_cpu_info())
    if not paths:
        pytest.skip("this CPU has no native kernels")
    return paths[0].build


@pytest.fixture(scope="module")
def original(build: KernelBuild, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the library. It is compiled in the user's cache, where other tests use it too."""
    directory = tmp_path_factory.mktemp("kernels") / "private"
    directory.mkdir(mode=0o700)
    try:
        library = open_build(build, machine_builds())
    except LibraryUnavailableError as error:
        pytest.skip(f"this machine has no native kernels: {error}")
    shutil.copy2(library._name, directory)
    return directory


@pytest.fixture
def compiled(original: Path, tmp_path: Path) -> Path:
    """A copy of `original` for one test."""
    return shutil.copytree(original, tmp_path / "private")


@pytest.fixture(autouse=True)
def no_compiled_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation has no compiled kernels, even if the one that is tested has."""
    monkeypatch.setattr(native_library, "COMPILED_DIR", tmp_path / "compiled")


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_kept_library_is_loaded_without_a_compiler(compiled: Path, build: KernelBuild) -> None:
    assert open_library(compiled, build, None).ps_abi() == native_library.ABI
    assert [path.suffix for path in compiled.iterdir()] == [".so"]


def test_library_that_another_process_was_compiling_is_loaded_without_a_compiler(
    original: Path, build: KernelBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "private"
    library = next(original.iterdir())

    def wait(*_: object) -> None:
        """For a lock, which the other process releases once the library is complete."""
        shutil.copy2(library, directory)

    monkeypatch.setattr("fcntl.flock", wait)
    assert open_library(directory, build, None).ps_abi() == native_library.ABI
    assert [path.name for path in directory.iterdir()] == [library.name]


def test_library_is_compiled_on_a_file_system_without_locks(
    compiled: Path, build: KernelBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = write_compiler(tmp_path, f'while [ "$1" != -o ]; do shift; done\ncp {compiled}/{build.name}.so "$2"')

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    assert open_library(tmp_path / "new", build, compiler).ps_abi() == native_library.ABI


def test_changed_sources_and_flags_change_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = shutil.copytree(native_library.SOURCE.parent, tmp_path / "kernels")
    monkeypatch.setattr(native_library, "SOURCE", kernels / "cpu.cpp")
    first, second = KernelBuild("first", ("-mavx2",)), KernelBuild("second", ("-mfma",))
    changed = replace(second, compiler_flags=("-mf16c",))
    found = {directory_name(builds) for builds in ((first,), (first, second), (second, first), (first, changed))}
    ours = [path for path in kernels.rglob("*") if path.suffix in (".cpp", ".h")]
    assert len(ours) > 1
    for path in ours:
        path.write_text(path.read_text() + "\n")
        found.add(directory_name((first,)))
    assert len(found) == 4 + len(ours)


def test_directory_and_library_are_private(compiled: Path) -> None:
    assert compiled.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in compiled.iterdir())


@pytest.mark.parametrize("writable", ["directory", "library"])
def test_library_that_others_may_write_is_refused(writable: str, compiled: Path, build: KernelBuild) -> None:
    path = compiled if writable == "directory" else next(compiled.iterdir())
    path.chmod(0o722)
    with pytest.raises(LibraryUnavailableError, match=r"can be written by others|other users can change"):
        open_library(compiled, build, None)


def test_directory_above_that_others_may_write_is_refused(compiled: Path, build: KernelBuild) -> None:
    compiled.parent.chmod(0o777)
    with pytest.raises(LibraryUnavailableError, match=f"other users can change the directory {compiled.parent}, which"):
        open_library(compiled, build, None)


def test_file_that_is_no_library_is_refused(compiled: Path, build: KernelBuild) -> None:
    next(compiled.iterdir()).write_bytes(b"not an ELF file")
    with pytest.raises(LibraryUnavailableError):
        open_library(compiled, build, None)


def test_compiler_and_its_own_processes_end_with_a_killed_server(tmp_path: Path) -> None:
    alive, compiler = tmp_path / "alive", tmp_path / "compiler"
    os.mkfifo(alive)
    compiler.write_text(f"#!/bin/sh\nsleep 100 > {alive} & wait\n")  # as g++ waits for cc1plus
    compiler.chmod(0o700)
    code = f"from {native_library.__name__} import _run_compiler; _run_compiler([{str(compiler)!r}])"
    with subprocess.Popen([sys.executable, "-c", code]) as server, alive.open("rb") as open_while_alive:
        server.kill()
        assert open_while_alive.read() == b""


def test_missing_compiler_is_reported_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(LibraryUnavailableError, match=r"no C\+\+ compiler: install g\+\+"):
        open_library(tmp_path / "private", KernelBuild("any", ()), None)


def test_missing_sources_make_the_library_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "SOURCE", tmp_path / "missing.cpp")
    with pytest.raises(LibraryUnavailableError, match=r"missing\.cpp"):
        open_build(KernelBuild("any", ()), ())


def test_failed_compilation_leaves_nothing_behind(tmp_path: Path) -> None:
    compiler = write_compiler(tmp_path, "echo 'cpu.cpp:1:1: error: this CPU will not do' >&2\nexit 1")
    with pytest.raises(LibraryUnavailableError, match="this CPU will not do"):
        open_library(tmp_path / "private", KernelBuild("any", ()), compiler)
    assert list((tmp_path / "private").iterdir()) == []


def write_compiler(directory: Path, script: str) -> str:
    compiler = directory / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o700)
    return str(compiler)


@pytest.fixture
def fresh_load() -> Iterator[None]:
    """`load_kernels` looks again, now and after the test."""
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@pytest.fixture
def copying_compiler(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that takes no time: it copies the library compiled for all tests."""
    library = next(original.iterdir())
    compiler = write_compiler(
        tmp_path, f"while [ $# -gt 0 ]; do if [ $1 = -o ]; then exec cp '{library}' \"$2\"; fi; shift; done\nexit 1"
    )
    monkeypatch.setattr(native_library, "find_compiler", lambda: compiler)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "find_compiler", lambda: None)


@pytest.mark.usefixtures("fresh_load", "no_compiler")
def test_machine_without_a_compiler_gets_one_warning_and_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert load_kernels() is None
        assert load_kernels() is None
    assert len(warnings_in(caplog)) == 1


@pytest.mark.usefixtures("fresh_load", "copying_compiler")
def test_compilation_is_announced_and_timed_once(
    build: KernelBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level(logging.INFO):
        open_build(build, machine_builds())
        open_build(build, machine_builds())
    compiling, compiled = caplog.messages
    assert compiling.startswith(f"Compiling cpu.cpp for {build.name} with ")
    assert re.fullmatch(rf"Compiled it for {build.name} in \d+\.\d s", compiled)


@pytest.mark.usefixtures("copying_compiler")
def test_kernels_compiled_for_all_users_are_found_before_the_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    builds = machine_builds()
    directory = compile_builds(native_library.COMPILED_DIR, builds)
    assert sorted(path.name for path in directory.iterdir()) == sorted(f"{each.name}.so" for each in builds)
    assert {path.stat().st_mode & 0o777 for path in (directory, *directory.iterdir())} == {0o755}
    monkeypatch.setattr(native_library, "find_compiler", lambda: None)
    for each in builds:
        assert open_build(each, builds).ps_abi() == native_library.ABI
    assert not (tmp_path / "cache").exists()


@needs_root
@pytest.mark.usefixtures("copying_compiler")
def test_kernels_compiled_by_root_are_found_by_other_users(
    build: KernelBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with tempfile.TemporaryDirectory() as image:  # others may not enter tmp_path
        Path(image).chmod(0o755)
        monkeypatch.setattr(native_library, "COMPILED_DIR", Path(image))
        compile_builds(Path(image), machine_builds())
        os.seteuid(NOBODY)
        try:
            library = open_build(build, machine_builds())
        finally:
            os.seteuid(0)
    assert library._name.startswith(image)


@pytest.mark.usefixtures("copying_compiler")
def test_compiled_kernels_that_others_may_write_are_not_used(
    build: KernelBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = compile_builds(native_library.COMPILED_DIR, machine_builds())
    directory.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        library = open_build(build, machine_builds())
    assert Path(library._name).is_relative_to(tmp_path / "cache")
    (warning,) = warnings_in(caplog)
    assert "other users can change the directory" in warning


def below_a_file(tmp_path: Path) -> tuple[Path, str]:
    (tmp_path / "file").touch()
    return tmp_path / "file", "Not a directory"


def open_to_others(tmp_path: Path) -> tuple[Path, str]:
    (tmp_path / "shared" / "penstock").mkdir(parents=True)
    (tmp_path / "shared" / "penstock").chmod(0o777)
    return tmp_path / "shared", "other users can change the directory"


@pytest.mark.usefixtures("copying_compiler")
@pytest.mark.parametrize("make_cache", [below_a_file, open_to_others])
def test_unusable_cache_directory_compiles_into_a_temporary_one(
    make_cache: Callable[[Path], tuple[Path, str]],
    build: KernelBuild,
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

    def watched_open(directory: Path, *arguments: Any) -> Any:
        used.append(directory)
        library = plain_open(directory, *arguments)
        modes.append(directory.stat().st_mode & 0o777)
        return library

    monkeypatch.setattr(native_library, "open_library", watched_open)
    with caplog.at_level(logging.WARNING):
        library = open_build(build, machine_builds())
        open_build(build, machine_builds())
    assert library.ps_abi() == native_library.ABI
    assert [directory.parent for directory in used[:2]] == [cache_home / "penstock", temporary]
    assert modes == [0o700, 0o700]
    assert list(temporary.iterdir()) == []
    (warning,) = warnings_in(caplog)
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
        assert load_kernels() is not None
    assert "no home directory" in caplog.text


@pytest.mark.usefixtures("fresh_load", "no_compiler")
def test_unusable_cache_without_a_compiler_names_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(below_a_file(tmp_path)[0]))
    with caplog.at_level(logging.WARNING):
        assert load_kernels() is None
    (warning,) = warnings_in(caplog)
    assert "no C++ compiler" in warning


def test_cache_follows_xdg_and_ignores_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "penstock"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == Path.home() / ".cache" / "penstock"
