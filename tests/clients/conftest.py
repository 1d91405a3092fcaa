"""Servers for client libraries that have a virtual environment of their own: demo models, a reranker, a real model."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from demo_models import EMBEDDING, GENERATION, REAL, RERANK

ROOT = Path(__file__).parents[2]
BIN = Path(os.environ.get("PENSTOCK_BIN", ROOT / ".venv" / "bin"))
"""The programs of the virtual environment that penstock is installed in."""


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo embedding model with a random head that scores pairs."""
    directory = tmp_path_factory.mktemp("models") / RERANK
    script = Path(__file__).with_name("write_reranker.py")
    subprocess.run([BIN / "python", script, directory], check=True)
    return directory


@pytest.fixture(scope="session")
def server_url(reranker: Path) -> Iterator[str]:
    """http://127.0.0.1:PORT of one server for all tests."""
    with serving("penstock-demo", "--embedding-model", EMBEDDING, "--rerank-model", str(reranker)) as url:
        yield url


@pytest.fixture(scope="module")
def scripted_url() -> Iterator[str]:
    """A server of a model that knows its answers, see `scripted_pass`."""
    options = ["--forward-pass", "scripted_pass:ScriptedPass", "--served-model-name", f"{GENERATION},*"]
    with serving(*options, python_path=Path(__file__).parent) as url:
        yield url


@pytest.fixture(scope="module")
def real_url() -> Iterator[str]:
    """A server of SmolLM2-135M-Instruct, whose chat template has no tools."""
    code = "from tests.real_models import DEFAULT_MODEL, package_model; print(package_model(DEFAULT_MODEL))"
    found = subprocess.run([BIN / "python", "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    with serving("--model", found.stdout.strip(), "--served-model-name", REAL) as url:
        yield url


@contextmanager
def serving(*options: str, python_path: Path | None = None) -> Iterator[str]:
    """http://127.0.0.1:PORT of a server with these options."""
    argv = [str(BIN / "penstock"), "serve", "--port", "0", *options]
    env = os.environ | ({} if python_path is None else {"PYTHONPATH": str(python_path)})
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    try:
        ready = next((line for line in process.stdout if line.startswith("Ready: ")), None)
        assert ready is not None, "the server has ended; its errors are above"
        yield ready.removeprefix("Ready: ").strip().removesuffix("/v1")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()
