"""What /proc says of real processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.tools.processes import descendants, is_running, module_of, process_use, session_members
from tests.system.processes import wait_until


def test_process_is_found_with_its_cpu_time_and_memory() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        assert child.pid in descendants(os.getpid())
        assert process_use(child.pid).rss_bytes > 0
        assert process_use(os.getpid()).cpu_s > 0
        assert module_of(child.pid) == ""
    finally:
        child.kill()
        child.wait()
    with pytest.raises(ProcessLookupError, match=str(child.pid)):
        process_use(child.pid)


def test_zombie_of_a_session_is_seen() -> None:
    code = "import os, signal\nif os.fork() == 0: os._exit(0)\nos.write(1, b'x')\nsignal.pause()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        wait_until(lambda: "Z" in session_members(parent.pid).values(), 10.0)
        members = session_members(parent.pid)
        assert len(members) == 2
        assert [pid for pid in members if is_running(pid)] == [parent.pid]
    finally:
        parent.kill()
        parent.communicate()
