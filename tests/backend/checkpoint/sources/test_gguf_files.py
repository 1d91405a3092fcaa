"""One GGUF model of several files is chosen by a rule, or by its quantisation or name."""

from __future__ import annotations

import pytest

from penstock.backend.checkpoint.sources.gguf_files import choose_gguf, find_gguf_models, name_models, tag_of
from penstock.backend.errors import StartupError

SIZES = {
    "README.md": 1,
    "M-Q8_0.gguf": 800,
    "M-Q4_K_M.gguf": 400,
    "M.IQ2_XS.gguf": 200,
    "UD-Q6_K_XL/M-UD-Q6_K_XL-00001-of-00002.gguf": 500,
    "UD-Q6_K_XL/M-UD-Q6_K_XL-00002-of-00002.gguf": 100,
    "mmproj-M-F16.gguf": 50,
    "M.imatrix.gguf": 5,
}


def test_shards_are_one_model_and_projectors_are_none() -> None:
    models = find_gguf_models(SIZES)
    assert {model.quantization: (len(model.files), model.num_bytes) for model in models} == {
        "Q8_0": (1, 800),
        "Q4_K_M": (1, 400),
        "IQ2_XS": (1, 200),
        "UD-Q6_K_XL": (2, 600),
    }
    assert name_models(models).startswith("IQ2_XS (200 B), Q4_K_M (400 B)")


@pytest.mark.parametrize(
    ("tag", "chosen"),
    [
        (None, "Q4_K_M"),
        ("q8_0", "Q8_0"),
        ("UD-Q6_K_XL", "UD-Q6_K_XL"),
        ("M-Q8_0.gguf", "Q8_0"),
        ("UD-Q6_K_XL/M-UD-Q6_K_XL-00001-of-00002.gguf", "UD-Q6_K_XL"),
    ],
)
def test_tag_names_a_quantisation_or_a_file(tag: str | None, chosen: str) -> None:
    assert choose_gguf(find_gguf_models(SIZES), tag, "it").quantization == chosen


def test_unknown_types_leave_the_smallest_and_unknown_tags_name_all() -> None:
    models = find_gguf_models({"large.gguf": 9, "small.gguf": 1})
    assert choose_gguf(models, None, "it").files == ("small.gguf",)
    with pytest.raises(
        StartupError, match=r"^it has no GGUF file Q2_K; it has small\.gguf \(1 B\), large\.gguf \(9 B\)$"
    ):
        choose_gguf(models, "Q2_K", "it")


def test_files_of_one_quantisation_are_told_apart_by_their_names() -> None:
    models = find_gguf_models({"a-Q4_0.gguf": 1, "b-Q4_0.gguf": 2, "b-Q8_0.gguf": 3})
    assert [tag_of(model, models) for model in models] == ["a-Q4_0.gguf", "b-Q4_0.gguf", "Q8_0"]
    assert choose_gguf(models, "b-Q4_0", "here").num_bytes == 2
    with pytest.raises(
        StartupError, match=r"^here has 2 GGUF files Q4_0: name one of a-Q4_0.gguf \(1 B\), b-Q4_0.gguf"
    ):
        choose_gguf(models, "Q4_0", "here")
