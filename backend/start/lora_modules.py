"""The adapters that `--lora-modules` names, and their announcement to frontends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.tensor_files.lora_config import CONFIG_FILE
from penstock.backend.errors import StartupError
from penstock.shm.messages import MAX_ADAPTERS, Adapter

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
NAME_FORM = "a name is 1 to 128 letters, digits and ._:/@+-, and begins with a letter or a digit"
_FORM = f"write --lora-modules NAME=DIR; {NAME_FORM}"


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter by its name in the API."""

    name: str
    directory: Path


class _VllmForm(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    path: Annotated[str, Meta(min_length=1)]
    base_model_name: str | None = None
    """Always None: every adapter has the server's one base model."""


def read_adapters(given: Sequence[str], model_names: Sequence[str]) -> tuple[NamedAdapter, ...]:
    """Read the adapters by name: each is NAME=DIR or vLLM's JSON object. model_names are taken. Raises StartupError."""
    found = tuple(map(_read, given))
    names = [*model_names, *(adapter.name for adapter in found)]
    for adapter in found:
        if names.count(adapter.name) > 1:
            raise StartupError(
                f"--lora-modules: {shorten(adapter.name)} is the name of the model or of another adapter"
            )
        if not adapter.directory.is_dir():
            raise StartupError(f"--lora-modules: the directory {adapter.directory} of {adapter.name} does not exist")
    if len(found) > MAX_ADAPTERS:
        raise StartupError(f"--lora-modules has {len(found)} adapters; the limit is {MAX_ADAPTERS}")
    return found


def _read(text: str) -> NamedAdapter:
    if text.lstrip().startswith("{"):
        try:
            described = msgspec.json.decode(text, type=_VllmForm)
        except msgspec.MsgspecError as error:
            raise StartupError(f"--lora-modules is {shorten(text)}: {error}; {_FORM}") from None
        name, path = described.name, described.path
    else:
        name, _, path = text.partition("=")
    if not NAME.fullmatch(name) or not path:
        raise StartupError(f"--lora-modules is {shorten(text)}; {_FORM}")
    return NamedAdapter(name, Path(path).expanduser())


def announce(adapters: Sequence[NamedAdapter], ranks: Sequence[int]) -> tuple[Adapter, ...]:
    """Return the adapters as the model card lists them; ranks are those of the pass. Raises StartupError."""
    if not adapters:
        return ()
    from penstock.backend.checkpoint.tensor_files.lora_adapter import adapter_id  # it imports torch

    return tuple(
        Adapter(
            adapter.name,
            adapter_id(adapter.directory),
            rank,
            max(0, int((adapter.directory / CONFIG_FILE).stat().st_mtime)),
        )
        for adapter, rank in zip(adapters, ranks, strict=True)
    )


def check_unchanged(adapters: Sequence[NamedAdapter], announced: Sequence[Adapter]) -> None:
    """Raise StartupError if the files are not the announced ones: the pass may have loaded either."""
    for before, now in zip(announced, announce(adapters, [one.rank for one in announced]), strict=True):
        if now.adapter_id != before.adapter_id:
            raise StartupError(
                f"--lora-modules: the files of {now.name} have changed since the start began: start again"
            )
