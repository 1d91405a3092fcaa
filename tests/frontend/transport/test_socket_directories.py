"""Sockets lie where other users cannot put their own in their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.frontend.main import check_backend_socket, listening_socket
from penstock.frontend.options import FrontendOptions
from penstock.frontend.transport.serving.listening import unlink


def test_directories_that_other_users_can_change_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "group" / "web.sock"
    path.parent.mkdir()
    path.parent.chmod(0o770)  # a group that may use the socket
    listening = listening_socket(FrontendOptions(uds=path), "frontend")
    unlink(listening)
    listening.close()
    with pytest.raises(SystemExit):
        check_backend_socket("--socket", path)
    assert f"frontend: --socket {path}: {path.parent} is not safe: other users can change" in capsys.readouterr().err
    check_backend_socket("--socket", path.parent.with_name("not-yet") / "backend.sock")
    tmp_path.chmod(0o777)
    with pytest.raises(SystemExit):
        listening_socket(FrontendOptions(uds=path), "frontend")
    (line,) = capsys.readouterr().err.splitlines()
    assert f"other users can change the directory {tmp_path}, which has mode 777" in line
    assert not path.exists()
