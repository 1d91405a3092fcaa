"""The models that `--model NAME=DIR`, given several times, names, and the options of their backends."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from penstock.backend.checkpoint.files.layout import CONFIG_FILE
from penstock.backend.model_names import PACKAGE_PREFIX
from penstock.backend.options import BackendOptions
from penstock.shm.memory.model_table import MAX_MODELS

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
NAME_RULE = "a name is 1 to 128 letters, digits and ._:/@+-, and begins with a letter or a digit"


class BadModels(ValueError):
    """The options contradict each other; the message is one line for the operator."""


@dataclasses.dataclass(frozen=True, slots=True)
class NamedModel:
    """A model by its name in the API. source is what --model takes: a directory, a GGUF file or a hub id."""

    name: str
    source: str


def is_one_without_name(given: Sequence[str]) -> bool:
    """Whether --model names the one model of a server. Raises BadModels."""
    return len(given) == 1 and isinstance(_read(given[0]), str)


def read_models(given: Sequence[str]) -> tuple[NamedModel, ...]:
    """Return the models of a server with several. Raises BadModels."""
    models = []
    for text in given:
        model = _read(text)
        if isinstance(model, str):
            raise BadModels(f"--model {text} has no name; with several models write --model NAME={text}")
        models.append(model)
    check_names(models)
    return tuple(models)


def scan_directory(directory: Path) -> tuple[NamedModel, ...]:
    """Return the models in a directory, by name. Raises BadModels if it cannot be read or has none."""
    try:
        entries = sorted(directory.expanduser().iterdir())
    except OSError as error:
        raise BadModels(f"--models-dir {directory} cannot be read: {error.strerror}") from None
    found = []
    for path in entries:
        is_file = path.suffix == ".gguf" and path.is_file()
        name = path.stem if is_file else path.name
        if (is_file or (path / CONFIG_FILE).is_file()) and _NAME.fullmatch(name):
            found.append(NamedModel(name, str(path)))
    if not found:
        raise BadModels(f"--models-dir {directory} has no model: no directory with a {CONFIG_FILE}, and no .gguf file")
    return tuple(found)


def check_names(models: Iterable[NamedModel]) -> None:
    """Raises BadModels for a name that two models have, and for too many models."""
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise BadModels(f"two models have the name {name}; each needs a name of its own")
    if len(names) > MAX_MODELS:
        raise BadModels(f"there are {len(names)} models; the limit is {MAX_MODELS}")


def _read(text: str) -> NamedModel | str:
    """A model without a name stays text. A path that exists, or a package, is one, even if it contains "="."""
    name, equals, source = text.partition("=")
    if not equals or text.startswith(PACKAGE_PREFIX) or Path(text).expanduser().exists():
        return text
    if not _NAME.fullmatch(name) or not source:
        raise BadModels(f"--model {text} is not NAME=DIR: {NAME_RULE}")
    return NamedModel(name, source)


def backends_by_name(main: BackendOptions, models: Iterable[NamedModel]) -> Mapping[str, BackendOptions]:
    """Return the options of each model's backend by the model's name. All but model, name and socket are main's.

    Raises BadModels for options that hold for one model only.
    """
    for option, value in (("--served-model-name", main.served_model_name), ("--revision", main.revision)):
        if value is not None:
            raise BadModels(f"{option} is {value}, but there are several models, each with a name of its own")
    if main.kv_events is not None:
        raise BadModels(f"--kv-events is {main.kv_events}, but each of several models would need an endpoint")
    if main.lora_modules:
        raise BadModels(f"--lora-modules is {main.lora_modules[0]}, but there are several models: whose adapter is it?")
    path = main.socket
    return {
        model.name: dataclasses.replace(
            main,
            model=model.source,
            served_model_name=model.name,
            socket=path.with_name(f"{path.stem}-m{number}{path.suffix}"),
        )
        for number, model in enumerate(models, start=1)
    }
