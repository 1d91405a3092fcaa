"""`penstock upgrade` against servers with the fake pass: under load, refused, and without memory for two backends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from dataclasses import fields
from pathlib import Path

import httpx
import pytest

from penstock.backend.model_names import DEMO_MODEL_DIR
from penstock.backend.options import BackendOptions
from penstock.process.children import module_argv
from penstock.serve.upgrade.new_options import BadOptions, changed
from tests.checkpoints import make_checkpoint
from tests.serve.serve_process import Serve, Start
from tests.serve.streams import IMPORTS_TESTS, SLOW, all_choices, bodies, samples
from tests.system.processes import wait_until

MOST_TRIES = 5


def begin_upgrade(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    argv = module_argv("penstock.main", ["upgrade", *words])
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def upgrade(tmp_path: Path, *words: str) -> tuple[int, str]:
    """Return the exit status, and what the operator sees."""
    process = begin_upgrade(tmp_path, *words)
    shown, _ = process.communicate()
    return process.returncode, shown


def command_line(serve: Serve) -> str:
    """That of the only backend."""
    (pid,) = serve.pids("penstock.backend.main")
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def test_file_descriptors_are_for_the_server_alone_to_set() -> None:
    names = [field.name.replace("_", "-") for field in fields(BackendOptions) if field.name.endswith(("_fd", "_fds"))]
    assert len(names) == 7
    for name in names:
        with pytest.raises(BadOptions, match=f"--{name} cannot be changed: the server sets it"):
            changed(BackendOptions(), [f"--{name}", "0"])


def test_streams_go_on_with_the_same_text_while_the_backend_is_replaced(start: Start, tmp_path: Path) -> None:
    serve = start(*SLOW, environment=IMPORTS_TESTS)
    serve.wait_until_ready()
    requests = bodies(60)
    with httpx.Client(base_url=f"http://127.0.0.1:{serve.port}", timeout=60) as client:
        expected = all_choices(client, requests)
        for number in range(MOST_TRIES):  # on a busy machine there may be no stream at the moment of the move
            upgrading = begin_upgrade(tmp_path, "--max-running", str(32 + number))
            while upgrading.poll() is None:
                assert all_choices(client, requests) == expected
            shown, _ = upgrading.communicate()
            assert (upgrading.returncode, shown.splitlines()[-1]) == (
                0,
                "penstock upgrade: the new backend has taken over",
            )
            wait_until(lambda: len(serve.pids("penstock.backend.main")) == 1, 60.0)
            assert f"--max-running {32 + number} " in command_line(serve)
            if sum(samples(client, "penstock_worker_streams_resumed_total")):
                break
        (backend,) = serve.pids("penstock.backend.main")
        os.kill(backend, signal.SIGKILL)  # a restart has the new options too, and the old path
        wait_until(lambda: serve.pids("penstock.backend.main") not in ([], [backend]), 60.0)
        assert all_choices(client, requests) == expected
        assert "--max-running 3" in command_line(serve)
    assert serve.stop() == 0
    assert list((tmp_path / "penstock").iterdir()) == []


def make_hybrid(model_dir: Path) -> str:
    """A model with a state, and the demo model's tokenizer."""
    for path in DEMO_MODEL_DIR.iterdir():
        if "token" in path.name or "template" in path.name:
            shutil.copy(path, model_dir)
    vocabulary = json.loads((model_dir / "tokenizer.json").read_text())["model"]["vocab"]
    return str(make_checkpoint("qwen3.5", model_dir, vocab_size=len(vocabulary) + 64))


def test_new_backend_finds_the_pages_and_states_of_running_streams(
    start: Start, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = ("--model", make_hybrid(tmp_path_factory.mktemp("hybrid")), "--served-model-name", "penstock-demo")
    serve = start(*model, "--forward-pass", "decoder", "--gpu", "none", "--kv-budget", "40MB", "--page-size", "16")
    serve.wait_until_ready()
    requests = bodies(400)
    with httpx.Client(base_url=f"http://127.0.0.1:{serve.port}", timeout=60) as client:
        expected = all_choices(client, requests)
        for _ in range(MOST_TRIES):  # there may be no stream at the moment of the move
            upgrading = begin_upgrade(tmp_path)
            while upgrading.poll() is None:
                assert all_choices(client, requests) == expected
            shown, _ = upgrading.communicate()
            assert upgrading.returncode == 0, shown
            if sum(samples(client, "penstock_kv_pages_restored_total")):
                break
        assert sum(samples(client, "penstock_kv_pages_restored_total"))
        assert all_choices(client, requests) == expected
    assert serve.stop() == 0


def test_bad_upgrades_leave_the_old_backend_and_one_without_memory_for_two_lets_requests_wait(
    start: Start, tmp_path: Path
) -> None:
    status, shown = upgrade(tmp_path)
    assert (status, shown.count("\n")) == (1, 1)
    assert "no server runs in" in shown
    serve = start()
    serve.wait_until_ready()
    before = serve.pids("penstock.backend.main")
    for words, reason in (
        (["--deterministic"], "the new backend is no replica of the old one: deterministic is True, not False"),
        (["--max-running", "0"], 'Invalid value "0" for --max-running'),
        (["--port", "80"], "Unknown option: --port"),
        (["--socket", "/x"], "--socket cannot be changed"),
        (["--max-batch-tokens", "8"], "the new backend exited with status 1 during its start"),
        (["--max-context", "64"], "the new backend has a context of 64 tokens"),
    ):
        status, shown = upgrade(tmp_path, *words)
        assert (status, reason in shown) == (1, True), shown
    assert serve.pids("penstock.backend.main") == before
    # An automatic budget leaves no memory for two: the old backend ends first, and requests wait.
    expected = serve.complete()
    assert expected[0] == 200
    upgrading = begin_upgrade(tmp_path, "--kv-budget", "auto")
    while upgrading.poll() is None:
        assert serve.complete() == expected
    shown, _ = upgrading.communicate()
    assert (upgrading.returncode, "the old one ends first" in shown) == (0, True), shown
    assert serve.pids("penstock.backend.main") != before
