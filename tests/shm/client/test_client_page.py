"""The programs of docs/client.md, exactly as printed, against a real backend process with the fake pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.system.processes import REPOSITORY, Command, start_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

POOLING_PASS = "tests.fake_encoder:PoolingFakePass"
PAGE = REPOSITORY / "docs" / "client.md"
PROGRAMS: dict[str, str] = {
    name: program
    for program, name in re.findall(r"```python\n(# (\S+\.py)\n.*?)```", PAGE.read_text(), flags=re.DOTALL)
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which the programs find the backend at the default socket path."""
    runtime_dir = tmp_path_factory.mktemp("runtime")
    runtime_dir.chmod(0o700)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime_dir), "PYTHONPATH": str(REPOSITORY)}
    backend: Command = start_backend(
        runtime_dir / "penstock" / "backend.sock", "--forward-pass", POOLING_PASS, "--kv-budget", "64MB"
    )
    yield environment
    assert backend.terminate() == 0
    backend.close()
    assert "Traceback" not in backend.output


def run(name: str, environment: dict[str, str], directory: Path) -> list[str]:
    """The lines that the program prints."""
    path = directory / name
    path.write_text(PROGRAMS[name])
    result = subprocess.run(
        [sys.executable, "-P", str(path)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


def check_first(lines: list[str]) -> None:
    assert re.fullmatch(r"penstock-demo: \d+ tokens, context \d+", lines[0])
    batches = [re.fullmatch(r"\[([\d, ]*)\] (NONE|LENGTH|STOP)", line) for line in lines[1:-1]]
    assert all(batches)
    assert sum(len(batch[1].split(",")) for batch in batches if batch and batch[1]) <= 16
    assert re.search(r"(LENGTH|STOP)$", lines[-2])
    assert lines[-1] == "0 prompt tokens came from the cache"


def check_several(lines: list[str]) -> None:
    assert lines[:8] == ["LENGTH 32"] * 8
    assert re.fullmatch(r"CANCELLED after at least \d+", lines[8])


def check_vectors(lines: list[str]) -> None:
    width = 8
    assert lines[0] == f"embed: {width} values"
    assert lines[1] == f"{width} values of 3 tokens"
    assert lines[2] == f"float32 (1000, {width}), lengths 1.000 to 1.000"


def check_errors(lines: list[str]) -> None:
    unavailable, bad_field, bad_token, too_long, expired, answered = lines
    assert unavailable.startswith("503 no backend is ready at ")
    assert bad_field == "400 Expected `float` <= 1.0 - at sampling.top_p"
    assert re.fullmatch(r"REJECTED BAD_TOKEN \d+ ", bad_token)
    assert re.fullmatch(r"REJECTED CONTEXT_TOO_LONG \d+ ", too_long)
    assert expired == "EXPIRED 0 tokens"
    assert answered == "LENGTH 4 tokens"


def check_constrained(lines: list[str]) -> None:
    *tokens, answer, scored = lines
    for line in tokens:
        assert re.fullmatch(r"\d+ -?\d+\.\d+ \d+ \(\d+, \d+\)", line)
    assert answer in ("answer: yes", "answer: no")
    match = re.fullmatch(r"prompt tokens scored: (\d+) of (\d+)", scored)
    assert match is not None
    assert int(match[1]) == int(match[2]) - 1 > 0


def check_logits(lines: list[str]) -> None:
    assert re.fullmatch(r"float32 \(5, \d+\)", lines[0])
    assert lines[1:] == ["True"]


def check_embeddings(lines: list[str]) -> None:
    assert sum(len(line[1 : line.index("]")].split(",")) for line in lines) == 6
    assert lines[-1].endswith("] LENGTH")


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "first.py": check_first,
    "several.py": check_several,
    "vectors.py": check_vectors,
    "errors.py": check_errors,
    "constrained.py": check_constrained,
    "logits.py": check_logits,
    "embeddings.py": check_embeddings,
}


def test_every_python_block_of_the_page_is_a_program_that_is_run() -> None:
    assert PAGE.read_text().count("```python") == len(PROGRAMS)
    assert set(PROGRAMS) == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_program_of_the_page_runs_as_printed(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    CHECKS[name](run(name, environment, tmp_path))
