"""Downloaded packages become one archive, which the check's `--peers` understands."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from penstock.tools.gpu_check.pack_peers import main


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    """A wheel of FlashAttention 3's layout, and nano-vllm's sources."""
    wheel, sources = tmp_path / "flash_attn_3-3.0.0-py3-none-any.whl", tmp_path / "nano-vllm"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("flash_attn_interface.py", "import flash_attn_3\n")
        archive.writestr("flash_attn_3/__init__.py", "")
        archive.writestr("flash_attn_3-3.0.0.dist-info/METADATA", "Name: flash-attn-3\n")
    (sources / "nanovllm").mkdir(parents=True)
    (sources / "nanovllm" / "__init__.py").write_text("from nanovllm.llm import LLM\n")
    (sources / "nanovllm" / "llm.py").write_text("class LLM: pass\n")
    return wheel, sources


def test_archive_has_the_packages_and_they_were_imported(
    tmp_path: Path, sources: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "peers.tar.xz"
    assert main(["--out", str(out), *map(str, sources)]) == 0
    with tarfile.open(out) as archive:
        names = set(archive.getnames())
    assert {
        "peers/flash_attn_interface.py",
        "peers/nanovllm/llm.py",
        "peers/flash_attn_3-3.0.0.dist-info/METADATA",
    } <= names
    assert not any("__pycache__" in name for name in names)
    assert "cannot be imported" not in capsys.readouterr().out


def test_package_that_cannot_be_imported_is_named(
    tmp_path: Path, sources: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (sources[1] / "nanovllm" / "llm.py").write_text("import no_such_engine\n")
    assert main(["--out", str(tmp_path / "peers.tar.xz"), str(sources[1])]) == 1
    assert "nanovllm cannot be imported here: ModuleNotFoundError: No module named 'no_such_engine'" in (
        capsys.readouterr().out
    )


def test_inputs_that_are_no_packages_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.whl").write_bytes(b"no archive")
    with zipfile.ZipFile(tmp_path / "climbing.whl", "w") as archive:
        archive.writestr("../outside.py", "")
    for name, message in (
        ("empty", "has no package"),
        ("broken.whl", "is not a wheel"),
        ("climbing.whl", "has a file outside of itself: ../outside.py"),
        ("absent", "is neither a wheel nor a directory"),
    ):
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path / "x.tar.xz"), str(tmp_path / name)])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x.tar.xz").exists()
