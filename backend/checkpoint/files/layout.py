"""The files of a checkpoint in the Hugging Face layout. Imports no torch, because start-up reads these files first."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from penstock.backend.checkpoint.files.json_file import convert, decode_without_twins, read_bytes, shorten
from penstock.backend.errors import StartupError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json")
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GGUF_SUFFIX = ".gguf"
MAX_SHARDS = 512
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.safetensors")
_NUMBERED = re.compile(r"(?P<stem>model|pytorch_model)-\d{5}-of-(?P<count>\d{5})\.safetensors")
_COMPILED = "_orig_mod."
"""torch.compile's addition to the names of a model's parts."""

TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
"""Prefixes of the text model in models that also read images: in files of transformers 4 and on the hub, and of
transformers 5."""

T = TypeVar("T")


class _Index(Struct, frozen=True):
    weight_map: Annotated[dict[str, str], Meta(min_length=1, max_length=1 << 20)]


def weight_files(model_dir: Path) -> tuple[str, ...]:
    """The names of the safetensors files: one, those of the index, or without an index numbered ones, of which none
    may be missing. Empty without any. Raises StartupError."""
    index = model_dir / INDEX_FILE
    if (model_dir / SINGLE_FILE).exists():
        return (SINGLE_FILE,)
    if index.exists():
        return shard_names(index)
    found = {path.name: match for path in model_dir.glob("*.safetensors") if (match := _NUMBERED.fullmatch(path.name))}
    if not found:
        return ()
    stem, count = next((match["stem"], int(match["count"])) for _, match in sorted(found.items()))
    if not 1 <= count <= MAX_SHARDS:
        raise StartupError(f"{model_dir} has shards of {count} files; at most {MAX_SHARDS} are allowed")
    names = tuple(f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1))
    for name in names:
        if name not in found:
            raise StartupError(f"{model_dir / name} does not exist, and {INDEX_FILE} neither")
    return names


def shard_names(index: Path) -> tuple[str, ...]:
    """The shard files that an index names. Raises StartupError."""
    return tuple(sorted(set(read_index(index).values())))


def read_index(path: Path) -> dict[str, str]:
    """Tensor name → file name of its shard, always a plain name and never a path. Raises StartupError.

    Names are those of `as_text_names`.
    """
    weight_map = convert(decode_without_twins(read_bytes(path), path), _Index, path).weight_map
    names = set(weight_map.values())
    for name in names:
        if not _SHARD_NAME.fullmatch(name):
            raise StartupError(
                f"{path}: weight_map names the file {shorten(name)}; it must be a plain *.safetensors name"
            )
    if len(names) > MAX_SHARDS:
        raise StartupError(f"{path} names {len(names)} files; at most {MAX_SHARDS} are allowed")
    return as_text_names(weight_map, path)


def as_text_names(by_name: dict[str, T], where: object) -> dict[str, T]:
    """Rename the text model's tensors in a larger or a compiled model's checkpoint to their names without it.

    Raises StartupError if two tensors get the same name.
    """

    def text_name(name: str) -> str:
        plain = name.replace(_COMPILED, "")
        prefix = next((prefix for prefix in TEXT_PREFIXES if plain.startswith(prefix)), "")
        return TEXT_PREFIXES.get(prefix, "") + plain.removeprefix(prefix)

    return rename_all(by_name, text_name, where)


def rename_all(by_name: dict[str, T], rename: Callable[[str], str], where: object) -> dict[str, T]:
    """Raises StartupError if two tensors get the same name."""
    renamed: dict[str, T] = {}
    for name, value in by_name.items():
        new = rename(name)
        if new in renamed:
            raise StartupError(f"{where}: tensor {shorten(name)} is another {shorten(new)}")
        renamed[new] = value
    return renamed
