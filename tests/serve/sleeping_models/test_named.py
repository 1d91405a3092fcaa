"""`--model NAME=DIR`, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backend.options import BackendOptions
from penstock.serve.options import ServeOptions, backend_options, one_or_several
from penstock.serve.sleeping_models.named import (
    BadModels,
    NamedModel,
    backends_by_name,
    is_one_without_name,
    read_models,
)
from penstock.shm.memory.model_table import MAX_MODELS


def test_models_have_the_names_that_they_are_given() -> None:
    found = read_models(["small=org/model", "big=/models/big.gguf"])
    assert found == (NamedModel("small", "org/model"), NamedModel("big", "/models/big.gguf"))


def test_one_model_needs_no_name_and_an_existing_path_is_one(tmp_path: Path) -> None:
    path = tmp_path / "a=b"
    path.mkdir()
    assert is_one_without_name([str(path)])
    assert is_one_without_name(["org/model"])
    assert not is_one_without_name(["a=org/model"])
    assert one_or_several(ServeOptions(models=("org/model",))) == ServeOptions(model="org/model")
    assert one_or_several(ServeOptions()) == ServeOptions()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a=x", "y"], "--model y has no name; with several models write --model NAME=y"),
        (["a=x", "a=y"], "two models have the name a; each needs a name of its own"),
        (["=x", "a=y"], "--model =x is not NAME=DIR: a name is 1 to 128 letters"),
        (["a b=x", "a=y"], "--model a b=x is not NAME=DIR"),
        (["a=", "b=y"], "--model a= is not NAME=DIR"),
        ([f"m{n}=x" for n in range(MAX_MODELS + 1)], f"there are {MAX_MODELS + 1} models; the limit is {MAX_MODELS}"),
    ],
)
def test_bad_names_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(BadModels) as refused:
        read_models(given)
    assert str(refused.value).startswith(message)


def test_each_model_has_a_backend_with_the_options_of_all() -> None:
    main = BackendOptions(kv_budget=5, quantize="int8", socket=Path("/x/s.sock"))
    first, second = backends_by_name(main, read_models(["a=x", "b=y"])).values()
    assert (first.model, first.model_id(), first.socket) == ("x", "a", Path("/x/s-m1.sock"))
    assert (second.model, second.model_id(), second.socket) == ("y", "b", Path("/x/s-m2.sock"))
    assert (second.kv_budget, second.quantize) == (5, "int8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 2}, "--replicas and several models exclude each other"),
        ({"embedding_model": "e"}, "--embedding-model and several models exclude each other"),
        ({"served_model_name": "n"}, "--served-model-name is n, but there are several models"),
        ({"lora_modules": ("a=/d",)}, "--lora-modules is a=/d, but there are several models"),
        ({"kv_events": "tcp://x:1"}, "--kv-events is tcp://x:1, but each of several models would need an endpoint"),
    ],
)
def test_options_of_a_single_model_are_refused(
    options: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        backend_options(ServeOptions(models=("a=x", "b=y"), **options))  # type: ignore[arg-type]
    assert message in capsys.readouterr().err
