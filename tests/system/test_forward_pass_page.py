"""docs/forward-pass.md: its code as printed, in the contract suite and behind a real server; refusals at start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.system.processes import REPOSITORY, START_TIMEOUT_S, Command, running, start_backend

PAGE = (REPOSITORY / "docs/forward-pass.md").read_text(encoding="utf-8")
PASS = "repeating_pass:RepeatingPass"


@pytest.fixture
def module_dir(tmp_path: Path) -> Path:
    """A directory with the page's module, outside the repository."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "repeating_pass.py").write_text(block)
    return tmp_path


def python_path(module_dir: Path) -> str:
    return f"{REPOSITORY}{os.pathsep}{module_dir}"


def test_printed_pass_fulfils_the_contract_with_pytest_and_numpy_alone(module_dir: Path) -> None:
    """No plugin of pytest's is loaded, and none of the development extras can be imported."""
    blocked = ("hypothesis", "httpx", "transformers", "torch", "tests", "psutil", "pytest_asyncio")
    (module_dir / "without_extras.py").write_text(
        "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in blocked)
    )
    command = re.search(r"python -m (penstock\.tools\.forward_pass_contract) (\S+)", PAGE)
    assert command is not None
    assert command[2] == PASS
    result = subprocess.run(
        [sys.executable, "-P", "-m", *command.groups(), "-p", "without_extras"],
        cwd=module_dir,
        env={**os.environ, "PYTHONPATH": python_path(module_dir), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\b19 passed, 14 skipped", result.stdout), result.stdout


def test_contract_suite_without_a_pass_says_how_to_run_it() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "penstock.tools.forward_pass_contract"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "package.module:Class" in result.stderr or "pkg.module:Class" in result.stderr


def test_printed_pass_answers_the_printed_request_behind_a_real_server(module_dir: Path) -> None:
    assert f"penstock serve --forward-pass {PASS}" in PAGE
    request = re.search(r"-d '(\{.*?\})'", PAGE)
    assert request is not None
    arguments = ("serve", "--forward-pass", PASS, "--host", "127.0.0.1", "--port", "0", "--kv-budget", "16MB")
    serve = Command("penstock.main", *arguments, python_path=python_path(module_dir), cwd=module_dir)
    with running(serve):
        url = serve.wait_for(r"Ready: (http://[^/\s]+)").group(1)
        response = httpx.post(
            f"{url}/v1/completions",
            content=request[1],
            headers={"content-type": "application/json"},
            timeout=START_TIMEOUT_S,
            verify=False,  # noqa: S501 - plain HTTP
        )
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"].startswith(" three one two")
        assert serve.terminate() == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("WideFakePass", r"logits of shape \[1, 4097\].*\[1, 4096\]"),
        ("SmallVocabularyPass", r"vocab_size of 4095.*token ids up to 4095"),
    ],
)
def test_pass_that_does_not_fit_its_spec_or_tokenizer_is_refused_at_start(
    name: str, reason: str, tmp_path: Path
) -> None:
    socket = tmp_path / "private" / "backend.sock"
    backend = Command("penstock.backend.main", "--socket", str(socket), "--forward-pass", f"tests.passes:{name}")
    with running(backend):
        assert backend.status() == 1
        lines = [line for line in backend.output.splitlines() if re.search(reason, line)]
        assert len(lines) == 1, backend.output
        assert "Traceback" not in backend.output


def test_pass_with_a_padded_vocabulary_is_served(tmp_path: Path) -> None:
    """Models pad their vocabulary: more logits than token ids are legitimate."""
    socket = tmp_path / "private" / "backend.sock"
    backend = start_backend(socket, "--forward-pass", "tests.passes:PaddedVocabularyPass")
    with running(backend):
        assert backend.terminate() == 0
