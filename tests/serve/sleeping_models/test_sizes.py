"""The estimate of models' sizes, with models that end or hold up its process."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.backend.model_names import DEMO_MODEL_DIR
from penstock.backend.options import BackendOptions
from penstock.serve.sleeping_models.sizes import estimate
from tests.serve.test_command_line import PANICKING
from tests.system.processes import wait_until


@pytest.fixture(autouse=True)
def forward_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of forward passes: waiting leaves its process id and waits, ending ends the process."""
    code = "import os, signal\nopen(os.environ['PID_FILE'], 'w').write(str(os.getpid()))\nsignal.pause()"
    (tmp_path / "waiting.py").write_text(code)
    (tmp_path / "ending.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))


def test_models_that_cannot_be_estimated_have_a_reason_and_the_others_a_size(tmp_path: Path) -> None:
    for name in ("panics", "powers", "good"):
        shutil.copytree(DEMO_MODEL_DIR, tmp_path / name)
    (tmp_path / "panics" / "tokenizer.json").write_text(PANICKING)
    (tmp_path / "powers" / "chat_template.jinja").write_text("{{ 9 ** (9 ** 9) }}")
    given = (("panics", "fake"), ("good", "ending:Pass"), ("powers", "fake"), ("good", "fake"))
    backends = [BackendOptions(model=str(tmp_path / name), forward_pass=a_pass) for name, a_pass in given]
    panics, ends, powers, good = estimate(backends).models
    assert isinstance(good, int)
    assert "cannot be used: Precompiled" in str(panics)
    assert "line 1: a power has more than the limit of 4096 bits" in str(powers)
    assert "died by SIGKILL" in str(ends)


def test_estimate_ends_with_the_process_that_asked(tmp_path: Path) -> None:
    code = (
        "from penstock.serve.sleeping_models.sizes import BackendOptions, estimate\n"
        f"estimate([BackendOptions(model={str(DEMO_MODEL_DIR)!r}, kv_budget=1 << 20, forward_pass='waiting:Pass')])"
    )
    asking = subprocess.Popen([sys.executable, "-P", "-c", code])
    pid_file = tmp_path / "pid"
    wait_until(lambda: pid_file.is_file() and pid_file.read_text() != "", 60.0)
    asking.send_signal(signal.SIGKILL)
    asking.wait()
    wait_until(lambda: not Path("/proc", pid_file.read_text()).exists(), 60.0)
