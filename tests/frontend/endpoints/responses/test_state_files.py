"""The directory in which a server keeps its responses."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.frontend.endpoints.responses.storage.state_files import (
    StateError,
    StateFiles,
    default_state_dir,
    open_database,
)
from penstock.frontend.options import FrontendOptions
from tests.frontend.test_main import Frontend, directory, run_to_its_end, start

__all__ = ["directory", "start"]  # fixtures

MAX_BYTES = 1 << 20


def test_each_address_has_its_own_database(tmp_path: Path) -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "web.sock"))
        paths = {
            StateFiles(str(tmp_path / "s"), kind, is_passing=False).prepare(MAX_BYTES, lines.append)
            for kind in (tcp, unix)
        }
        assert len(paths) == 2
        assert tmp_path / "s" / f"127.0.0.1-{tcp.getsockname()[1]}" / "responses.sqlite3" in paths
        assert lines == []


def test_damaged_database_is_set_aside(tmp_path: Path) -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        files = StateFiles(str(tmp_path / "s"), listening, is_passing=False)
        path = files.prepare(MAX_BYTES, lines.append)
        path.write_bytes(b"torn" * 5000)
        assert files.prepare(MAX_BYTES, lines.append) == path
    assert len(lines) == 1
    assert "responses.sqlite3.damaged" in lines[0]
    assert path.with_name("responses.sqlite3.damaged").read_bytes().startswith(b"torn")
    open_database(str(path), MAX_BYTES).close()


def test_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        files = StateFiles(str(tmp_path / "open"), listening, is_passing=False)
        with pytest.raises(StateError, match="other users can change the directory"):
            files.prepare(MAX_BYTES, print)
        (tmp_path / "file").write_text("")
        with pytest.raises(StateError, match="Not a directory"):
            StateFiles(str(tmp_path / "file"), listening, is_passing=False).prepare(MAX_BYTES, print)


def test_passing_servers_leave_no_files(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dead = tmp_path / "passing-1"
        dead.mkdir(mode=0o700)
        (dead / "owner").write_text("boot/1/2/3")
        files = StateFiles(str(tmp_path), listening, is_passing=True)
        files.prepare(MAX_BYTES, print)
        assert [path.name for path in tmp_path.iterdir()] == [f"passing-{os.getpid()}"]
        files.close()
        assert list(tmp_path.iterdir()) == []


def test_passing_server_replaces_the_files_of_a_killed_one_with_its_number(tmp_path: Path) -> None:
    """A server in a container has the same process id each time."""
    own = tmp_path / f"passing-{os.getpid()}"
    own.mkdir(mode=0o700)
    (own / "owner").write_text("boot/1/2/3")
    (own / "left over").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert StateFiles(str(tmp_path), listening, is_passing=True).prepare(MAX_BYTES, print).parent == own
    assert not (own / "left over").exists()


def test_passing_server_that_just_begins_keeps_its_directory(tmp_path: Path) -> None:
    beginning = tmp_path / "passing-1"
    beginning.mkdir(mode=0o700)
    (beginning / "owner").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        StateFiles(str(tmp_path), listening, is_passing=True).prepare(MAX_BYTES, print)
    assert beginning.exists()


def test_database_that_cannot_be_opened_is_replaced_by_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    database = open_database(str(tmp_path / "none" / "db"), MAX_BYTES)
    assert not database.is_shared
    assert "kept in the memory of this worker" in caplog.text
    database.close()


def test_default_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert FrontendOptions().state_dir == "/state/penstock"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_state_dir() == "/home/somebody/.local/state/penstock"


def test_directory_that_was_asked_for_must_be_usable(tmp_path: Path) -> None:
    status, output = run_to_its_end(tmp_path, "--port", "0", "--state-dir", "/proc/none")
    assert status == 1
    assert output.startswith("frontend: --state-dir: /proc/none/")
    assert output.count("\n") == 1


def test_default_directory_that_is_unusable_leaves_memory(
    start: Callable[..., Frontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    frontend = start("--workers", "2")
    line = "frontend: responses are kept in the memory of the worker that made them: /proc/none/penstock/"
    assert line in frontend.log
    frontend.wait_for("no backend yet")
    assert frontend.client.get("/health").status_code == 200
