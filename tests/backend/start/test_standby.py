"""A backend that waits to take another one's place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
from penstock.backend import main
from penstock.backend.start import standby
from penstock.backend.engine.loop import Engine
from penstock.backend.options import BackendOptions
from penstock.shm.memory.fd_mailbox import FdMailbox

imported = set()

def wait(fd):
    imported.update(sys.modules)
    return True

def run(engine):
    print([name for name in sys.modules if name.startswith("penstock") and name not in imported])

standby.wait_for_turn, Engine.run = wait, run
mailbox = FdMailbox.create()
options = BackendOptions(socket=Path(sys.argv[1]), gpu="none", kv_budget=4 << 20)
main.run(options=replace(options, turn_fd=0, weights_fds=mailbox.fds))
"""


def test_nothing_of_ours_is_imported_after_the_wait(tmp_path: Path) -> None:
    """The package may have been upgraded meanwhile: parts of two versions do not fit together."""
    command = [sys.executable, "-P", "-c", SCRIPT, str(tmp_path / "b.sock")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr
