"""`penstock compile-kernels` prints what it has written, or one line that says why it cannot."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from penstock.backend.passes.cpu.library import native_library
from penstock.backend.passes.cpu.library.cpu_paths import machine_builds
from penstock.main import app


def run(out: Path) -> int:
    with pytest.raises(SystemExit) as ended:
        app(["compile-kernels", "--out", str(out)])
    return int(ended.value.code or 0)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "compiler"
    path.write_text('#!/bin/sh\nwhile [ $1 != -o ]; do shift; done\necho compiled > "$2"\n')
    path.chmod(0o700)
    monkeypatch.setattr(native_library, "find_compiler", lambda: str(path))
    return path


@pytest.mark.skipif(not machine_builds(), reason="this architecture has no native kernels")
@pytest.mark.usefixtures("compiler")
def test_all_builds_are_written_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "image" / "kernels") == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.stem for path in written] == [build.name for build in (*machine_builds(), native_library.STEP_BUILD)]
    assert {path.read_text() for path in written} == {"compiled\n"}
    assert {path.parent.parent for path in written} == {tmp_path / "image" / "kernels"}


@pytest.mark.skipif(not machine_builds(), reason="this architecture has no native kernels")
def test_failure_is_one_line(compiler: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiler.write_text("#!/bin/sh\necho 'fatal error: no space' >&2\nexit 1\n")
    assert run(tmp_path) == 1
    assert capsys.readouterr().err == f"penstock compile-kernels: {compiler} failed: fatal error: no space\n"


def test_architecture_without_kernels_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert run(tmp_path) == 1
    assert capsys.readouterr().err == "penstock compile-kernels: there are no native kernels for riscv64\n"
