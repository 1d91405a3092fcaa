"""Perplexity of the real model in each type of weights, against fp32 with the same weights and against llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.backend.checkpoint.hub import resolve_model
from penstock.tools.bench.components.scored_model import scored_model
from tests.quality.made_files import K_MIXTURE, make_files
from tests.real_models import download_timeout

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytestmark = [download_timeout, pytest.mark.usefixtures("own_caches")]

RECORDED = json.loads((Path(__file__).parent / "recorded" / "perplexity.json").read_text())
PUBLISHED = "Q4_1"
MADE = ("F16", "Q8_0", "Q4_0", "Q5_0", "Q5_1", "IQ4_NL", K_MIXTURE)
LARGEST_LOSS = 0.01
"""Of a GGML type, as a share of the perplexity in fp32 with the same weights."""
LARGEST_RATIO_TO_LLAMA_CPP = 1.005
LARGEST_LOSS_OF_INT8 = 0.005


@pytest.fixture(scope="module")
def windows() -> NDArray[np.int32]:
    return np.array(RECORDED["tokens"], np.int32).reshape(-1, RECORDED["window_tokens"])


@pytest.fixture(scope="module")
def files(real_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("types")
    digests = make_files(real_gguf, MADE, made)
    assert digests == {name: RECORDED["files"][name]["sha256"] for name in MADE}
    return {PUBLISHED: real_gguf} | {name: made / f"{name}.gguf" for name in MADE}


def served_perplexity(path: Path, windows: NDArray[np.int32], quantize: str = "none") -> float:
    with scored_model(resolve_model(str(path)), quantize) as model:
        return model.perplexity(windows)


def recorded(name: str) -> Any:
    return RECORDED["files"][name]


@pytest.mark.parametrize("name", [PUBLISHED, *MADE])
def test_a_type_loses_no_quality(name: str, files: dict[str, Path], windows: NDArray[np.int32]) -> None:
    found = served_perplexity(files[name], windows)
    assert found == pytest.approx(recorded(name)["fp32"], rel=LARGEST_LOSS)
    assert found <= recorded(name)["llama.cpp"] * LARGEST_RATIO_TO_LLAMA_CPP


def test_int8_made_at_load_is_as_good_as_16_bits(files: dict[str, Path], windows: NDArray[np.int32]) -> None:
    found = served_perplexity(files["F16"], windows, "int8")
    assert found == pytest.approx(recorded("F16")["fp32"], rel=LARGEST_LOSS_OF_INT8)


def test_int4_made_at_load_is_as_good_as_q4_0_in_llama_cpp(files: dict[str, Path], windows: NDArray[np.int32]) -> None:
    assert served_perplexity(files["F16"], windows, "int4") <= recorded("Q4_0")["llama.cpp"]
