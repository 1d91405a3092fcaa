"""Compiled kernels are found by what they are made of, made once, and never taken from where others could write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.backend.passes.cuda.device import cubin_cache, nvrtc
from penstock.backend.passes.cuda.device.cubin_cache import CubinCache, cubin_name
from penstock.backend.passes.cuda.device.launcher import Kernel, KernelFailed
from penstock.process.cache_directory import CUBINS_VARIABLE

KERNEL = Kernel("step/step.cu", "change_pages", (), 128)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of cubins. Compilation is replaced."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(CUBINS_VARIABLE, raising=False)
    cubin_cache._warn_not_kept.cache_clear()

    def compile_module(kernels: list[Kernel], arch: str) -> bytes:
        return f"{kernels[0].source} for {arch}".encode()

    monkeypatch.setattr(nvrtc, "compile_module", compile_module)
    return tmp_path / "cache" / "penstock" / "cubins"


def test_second_start_compiles_nothing(kept: Path) -> None:
    for num_compiled in (1, 0):
        cache = CubinCache("sm_90a")
        with cache.opened([KERNEL]) as path:
            assert path.read_bytes() == b"step/step.cu for sm_90a"
            assert path == kept / cubin_name([KERNEL], "sm_90a")
        assert cache.num_compiled == num_compiled
    assert len(list(kept.iterdir())) == 1


def test_brought_cubin_comes_first_and_a_missing_one_is_compiled(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CUBINS_VARIABLE, str(tmp_path))
    (tmp_path / cubin_name([KERNEL], "sm_80")).write_bytes(b"brought")
    with CubinCache("sm_80").opened([KERNEL]) as path:
        assert path.read_bytes() == b"brought"
    with CubinCache("sm_89").opened([KERNEL]) as path:
        assert path.parent == kept


def test_name_depends_on_source_macros_and_architecture(tmp_path: Path) -> None:
    (tmp_path / "step.cu").write_text("another source")
    names = {
        cubin_name([KERNEL], "sm_90a"),
        cubin_name([KERNEL], "sm_80"),
        cubin_name([replace(KERNEL, macros=(("ACT", 1),))], "sm_90a"),
        cubin_name([replace(KERNEL, source=str(tmp_path / "step.cu"))], "sm_90a"),
    }
    assert len(names) == 4
    assert cubin_name([replace(KERNEL, entry="other", num_threads=64)], "sm_90a") in names  # the same module


def test_directory_that_others_can_write_is_not_used(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept.mkdir(parents=True)
    kept.chmod(0o777)
    (kept / cubin_name([KERNEL], "sm_90a")).write_bytes(b"planted")
    for _ in range(2):
        with CubinCache("sm_90a").opened([KERNEL]) as path:
            assert path.read_bytes() == b"step/step.cu for sm_90a"
        assert not path.exists()
    (warning,) = caplog.messages
    assert "cannot be kept" in warning
    assert "mode 777" in warning


def test_cubin_that_others_can_write_is_not_used(kept: Path) -> None:
    kept.mkdir(parents=True, mode=0o700)
    planted = kept / cubin_name([KERNEL], "sm_90a")
    planted.write_bytes(b"planted")
    planted.chmod(0o666)
    with CubinCache("sm_90a").opened([KERNEL]) as path:
        assert path.read_bytes() == b"step/step.cu for sm_90a"


def test_failed_compilation_leaves_no_file(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_kernels: object, _arch: str) -> bytes:
        raise KernelFailed("nothing is undefined")

    monkeypatch.setattr(nvrtc, "compile_module", fail)
    with pytest.raises(KernelFailed, match="undefined"), CubinCache("sm_90a").opened([KERNEL]):
        pass
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize(("version", "more"), [("12.8", ()), ("12.9", ("--no-cache",)), ("13.0", ("--no-cache",))])
def test_a_module_of_nvrtcs_own_cache_has_no_report(
    version: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start takes such a module as it is; whoever wants the report does without that cache."""
    given: list[tuple[str, ...]] = []

    def compile_source(_text: str, _name: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        given.append(options)
        log = "Compiling entry function 'change_pages' for 'sm_90a'\nUsed 12 registers" if len(given) > 1 else ""
        return b"code", log

    monkeypatch.setattr(nvrtc, "_compile", compile_source)
    monkeypatch.setattr(nvrtc, "version", lambda: version)
    assert nvrtc.compile_module([KERNEL], "sm_90a") == b"code"
    assert nvrtc.compile_kernel(KERNEL, "sm_90a").registers == 12
    assert given[1] == (*given[0], *more)


def test_architecture_of_a_capability() -> None:
    assert [nvrtc.architecture(each) for each in ((8, 0), (8, 9), (9, 0), (12, 0))] == [
        "sm_80", "sm_89", "sm_90a", "sm_120",
    ]  # fmt: skip
