"""Chooses one GGUF model among several files of a repository, a wheel or a directory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.backend.checkpoint.files.layout import GGUF_SUFFIX
from penstock.backend.errors import StartupError
from penstock.process.options import format_size

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-\d{5}\.gguf", re.IGNORECASE)
_TYPE = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d[A-Z0-9_]*|BF16|F16|F32|MXFP4\w*))(?=[-.]|$)", re.IGNORECASE)
_NO_MODEL = re.compile(r"(?:^|[-._/])(?:mmproj|imatrix)(?=[-._])", re.IGNORECASE)
_PREFERRED = (
    "Q4_K_M",
    "Q4_K_S",
    "Q5_K_M",
    "Q5_K_S",
    "Q6_K",
    "Q4_1",
    "Q4_0",
    "Q5_1",
    "Q5_0",
    "Q8_0",
    "BF16",
    "F16",
    "F32",
)
"""A model of 4 bits first: it is the smallest one that answers nearly as the whole one does."""
_MAX_NAMED = 12


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A file, or all shards of one model in their order."""

    files: tuple[str, ...]
    num_bytes: int

    @property
    def quantization(self) -> str:
        """As the file's name says it; empty if it does not."""
        found = _TYPE.findall(self.files[0].removesuffix(GGUF_SUFFIX))
        return str(found[-1]).upper() if found else ""

    def is_named(self, tag: str) -> bool:
        """Whether tag is its quantisation, or one of its files: by path or last name, with or without .gguf."""
        wanted = tag.upper().removesuffix(GGUF_SUFFIX.upper())
        paths = [file.upper().removesuffix(GGUF_SUFFIX.upper()) for file in self.files]
        return wanted in (self.quantization, *paths, *(path.rpartition("/")[2] for path in paths))


def find_gguf_models(sizes: Mapping[str, int]) -> list[GgufModel]:
    """Return the models among files, given by name and size. Projectors of images are none."""
    shards: dict[str, list[str]] = {}
    for name in sorted(sizes):
        if name.lower().endswith(GGUF_SUFFIX) and not _NO_MODEL.search(name):
            shard = _SHARD.fullmatch(name)
            shards.setdefault(shard["stem"] if shard else name, []).append(name)
    return [GgufModel(tuple(names), sum(sizes[name] for name in names)) for names in shards.values()]


def find_projectors(sizes: Mapping[str, int]) -> list[str]:
    """Return the files of vision parts among files, the preferred first: the smallest that is not quantised."""

    def key(name: str) -> tuple[bool, int]:
        return _TYPE.findall(name)[-1:] not in (["F16"], ["BF16"], ["f16"], ["bf16"]), sizes[name]

    return sorted((name for name in sizes if name.endswith(GGUF_SUFFIX) and "mmproj" in name.lower()), key=key)


def choose_gguf(models: list[GgufModel], tag: str | None, where: str) -> GgufModel:
    """Return the model that tag names, by quantisation or file; without one the preferred. Raises StartupError."""
    if tag is None:
        ranks = {name: rank for rank, name in enumerate(_PREFERRED)}
        return min(models, key=lambda model: (ranks.get(model.quantization, len(ranks)), model.num_bytes))
    found = [model for model in models if model.is_named(tag)]
    if not found:
        raise StartupError(f"{where} has no GGUF file {tag}; it has {name_models(models)}")
    if len(found) > 1:
        raise StartupError(f"{where} has {len(found)} GGUF files {tag}: name one of {name_models(found)}")
    return found[0]


def tag_of(model: GgufModel, models: list[GgufModel]) -> str:
    """Return the quantisation, or the file's name if another of the models has the same one, or it is unknown."""
    num_same = sum(other.quantization == model.quantization for other in models)
    return model.quantization if model.quantization and num_same == 1 else model.files[0]


def name_models(models: list[GgufModel], among: list[GgufModel] | None = None) -> str:
    """Their tags and sizes; among are all that the tags tell apart, if others belong to them."""
    by_size = sorted(models, key=lambda model: model.num_bytes)
    named = [f"{tag_of(model, among or models)} ({format_size(model.num_bytes)})" for model in by_size]
    left_out = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    return ", ".join(named[:_MAX_NAMED]) + left_out
