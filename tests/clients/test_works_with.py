"""docs/works-with.md: its Python and JavaScript as printed, each in the environment that has its packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import BIN, serving
from demo_models import EMBEDDING
from test_javascript import NODE_CLIENTS
from works_with_page import ADDRESS, examples

CLIENTS = Path(sys.executable).parent
AGENTS = Path(sys.prefix) / "agents" / "bin"
PROGRAMS = {
    **dict.fromkeys(("OpenAI's SDK", "Anthropic", "Cohere", "Hugging Face", "LangChain and LangGraph"), BIN),
    **dict.fromkeys(("LiteLLM", "Instructor"), BIN),
    **dict.fromkeys(("LlamaIndex", "Haystack", "Chroma", "Qdrant"), CLIENTS),
    **dict.fromkeys(("OpenAI's Agents SDK", "Pydantic AI", "DSPy", "smolagents", "AutoGen"), AGENTS),
}
"""Whose interpreter runs an example."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("penstock-demo", "--served-model-name", "chat", "--embedding-model", EMBEDDING) as url:
        yield url


def output(argv: list[str | Path], code: str, url: str, home: Path, directory: Path) -> str:
    assert ADDRESS in code
    environment = os.environ | {"HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ended = subprocess.run(
        [*map(str, argv)],
        input=code.replace(ADDRESS, url),
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.strip()


@pytest.mark.parametrize("name", examples("python"))
def test_python_prints_its_answer(name: str, url: str, tmp_path: Path) -> None:
    printed = output([PROGRAMS[name] / "python", "-"], examples("python")[name], url, tmp_path, tmp_path)
    assert printed
    if name == "Chroma":
        assert printed == "[['Join paths.']]"


@pytest.mark.skipif(not (NODE_CLIENTS / "node_modules").is_dir(), reason="npm is not installed")
@pytest.mark.parametrize("name", examples("javascript"))
def test_javascript_prints_its_answer(name: str, url: str, tmp_path: Path) -> None:
    # A module on standard input finds packages from the working directory.
    argv: list[str | Path] = ["node", "--input-type=module", "-"]
    assert output(argv, examples("javascript")[name], url, tmp_path, NODE_CLIENTS)
