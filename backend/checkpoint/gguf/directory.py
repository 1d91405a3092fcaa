"""Presents a GGUF file, or its shards, as a checkpoint directory in the Hugging Face layout.

The directory is in the cache: config.json, tokenizer.json, tokenizer_config.json and generation_config.json, made from
the file's metadata, and links to the files. Sampling settings that the file does not have are llama.cpp's.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.backend.checkpoint.config.tensors import expected_tensors
from penstock.backend.checkpoint.config_json import parse_decoder_config
from penstock.backend.checkpoint.files.json_file import read_json_object, shorten
from penstock.backend.checkpoint.files.layout import (
    CONFIG_FILE,
    GENERATION_FILE,
    GGUF_SUFFIX,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from penstock.backend.checkpoint.formats.numbers.ggml import BLOCK_TYPES
from penstock.backend.checkpoint.gguf.cached_directories import cached_directory
from penstock.backend.checkpoint.gguf.config import EMBEDDING, ROPE_TENSORS, make_config
from penstock.backend.checkpoint.gguf.encoders import (
    ANSWER_HEAD,
    ENCODERS,
    answer_labels,
    encoder_names,
    make_encoder_config,
    pooling_files,
)
from penstock.backend.checkpoint.gguf.header import GgufHeader, GgufTensor, open_tensors, read_header
from penstock.backend.checkpoint.gguf.metadata import Metadata
from penstock.backend.checkpoint.gguf.names import GgufNames
from penstock.backend.checkpoint.gguf.projector import PROJECTOR_FILE, find_projector, read_projector
from penstock.backend.checkpoint.gguf.tokenizer import GgufTokenizer, check_tokenizer
from penstock.backend.errors import StartupError
from penstock.process.private_directory import UnsafeDirectory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.formats.tensor_file import StoredTensor, TensorFile


FORMAT = "12"
"""Increase it when the generated files change."""

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_SHARDS = 512
_MAX_MTP_LAYERS = 16
_CONVOLUTION_DIMENSIONS = 2
_EXPERT_DIMENSIONS = 3
"""Number of dimensions of a tensor with the matrices of all experts."""
_SHARED_GATE = "shared_expert_gate.weight"
"""A vector in GGUF files, and a matrix of one row elsewhere."""
_CONVOLUTION = "conv1d.weight"
"""[channels, width] in GGUF files, and [channels, 1, width] elsewhere."""


def gguf_directory(path: Path, projector: Path | None = None) -> Path:
    """The directory for a file, or for the first of its shards, and the projector of its pictures, by default the one
    beside it. Raises StartupError naming the file."""
    try:
        # In the hub's cache a file is a link to one without a name; only its directory may be resolved.
        paths = _shards(path.parent.resolve() / path.name)
        projector = find_projector(paths[0]) if projector is None else projector.resolve()
        files = paths if projector is None else [*paths, projector]
        return cached_directory("gguf", path.stem, files, FORMAT, partial(_write, paths=paths, projector=projector))
    except (OSError, UnsafeDirectory) as error:
        raise StartupError(f"the configuration of {path} cannot be read or kept: {error}") from None


def open_gguf_links(model_dir: Path) -> list[TensorFile]:
    """Open the GGUF files of a directory that `gguf_directory` made, with tensors under Hugging Face's names.

    A tensor of all experts becomes one tensor for each expert. None for another directory. The caller closes the files.
    Raises StartupError.
    """
    links = [path for path in sorted(model_dir.glob(f"*{GGUF_SUFFIX}")) if path.is_symlink()]
    if not links:
        return []
    config = read_json_object(model_dir / CONFIG_FILE)
    names = encoder_names(config) or _decoder_names(parse_decoder_config(config))
    files = [open_tensors(path) for path in links]
    for file in files:
        file.tensors = {
            name: part
            for gguf_name, tensor in file.tensors.items()
            for name, part in _parts(tensor, names.hf_names(gguf_name, tensor.shape))
        }
    return files


def _parts(tensor: StoredTensor, names: list[str]) -> Iterator[tuple[str, StoredTensor]]:
    for index, name in enumerate(names):
        part = tensor
        if len(names) > 1 or len(tensor.shape) == _EXPERT_DIMENSIONS:
            part = tensor.item(index)
        if len(part.shape) == 1 and name.endswith(_SHARED_GATE):
            part = replace(part, shape=(1, *part.shape))
        if len(part.shape) == _CONVOLUTION_DIMENSIONS and name.endswith(_CONVOLUTION):
            part = replace(part, shape=(part.shape[0], 1, part.shape[1]))
        yield name, part


def _shards(path: Path) -> list[Path]:
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if int(match["number"]) != 1 or not 1 <= count <= _MAX_SHARDS:
        raise StartupError(f"{path} is shard {match['number']} of {count}; give the first of at most {_MAX_SHARDS}")
    return [path.with_name(f"{match['stem']}-{i:05}-of-{count:05}{GGUF_SUFFIX}") for i in range(1, count + 1)]


def _write(directory: Path, paths: list[Path], projector: Path | None) -> None:
    contents = _contents([read_header(path) for path in paths])
    if projector is not None:
        config = json.loads(contents[CONFIG_FILE])
        own = read_projector(projector, config)
        contents |= own.files | {CONFIG_FILE: json.dumps(config | own.config, indent=1)}
        (directory / PROJECTOR_FILE).parent.mkdir(mode=0o700)
        (directory / PROJECTOR_FILE).symlink_to(projector)
    for name, text in contents.items():
        (directory / name).parent.mkdir(mode=0o700, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    for number, path in enumerate(paths, 1):
        (directory / f"weights-{number:05}{GGUF_SUFFIX}").symlink_to(path)


def _contents(headers: list[GgufHeader]) -> dict[str, str]:
    """The text of each file. Raises StartupError."""
    first, tensors = headers[0], _all_tensors(headers)
    count = first.metadata.get("split.count", 1)
    if count not in (0, len(headers)):
        raise StartupError(f"{first.path}: split.count is {shorten(count)}; the name of the file says {len(headers)}")
    try:
        if EMBEDDING not in tensors:
            raise StartupError(f"tensor {EMBEDDING} is missing")
        metadata, tokenizer = Metadata(first.metadata), GgufTokenizer(first.metadata)
        pooling = pooling_files(metadata)
        is_encoder, ends = metadata.architecture in ENCODERS, tokenizer.end_tokens()
        config = _encoder_config(metadata, tensors) if is_encoder else _decoder_config(metadata, tensors, headers, ends)
        metadata.refuse_unread(is_causal=not is_encoder)
        return pooling | {
            CONFIG_FILE: json.dumps(config, indent=1),
            GENERATION_FILE: json.dumps({"eos_token_id": ends} | sampling_defaults(first.metadata)),
            TOKENIZER_FILE: check_tokenizer(tokenizer.tokenizer_json(adds_end=is_encoder or bool(pooling))),
            TOKENIZER_CONFIG_FILE: json.dumps(tokenizer.tokenizer_config(), ensure_ascii=False),
        }
    except StartupError as error:
        raise StartupError(f"{first.path}: {error}") from None


def _encoder_config(metadata: Metadata, tensors: dict[str, GgufTensor]) -> dict[str, Any]:
    config = _without_nulls(make_encoder_config(metadata, tensors))
    return config | {"quantization_config": _formats(tensors, ENCODERS[metadata.architecture].names)}


def _decoder_config(
    metadata: Metadata, tensors: dict[str, GgufTensor], headers: list[GgufHeader], ends: list[int]
) -> dict[str, Any]:
    factors = _rope_factors(headers)
    labels = answer_labels(metadata, tensors)
    config = _without_nulls(make_config(metadata, tensors, factors)) | labels | {"eos_token_id": ends}
    decoder = parse_decoder_config(config)
    others = factors.keys() | ({ANSWER_HEAD} if labels else set())
    others |= {name for name in tensors if name.startswith(_unused_tensors(decoder, metadata.required("block_count")))}
    _refuse_other_tensors({name: tensors[name] for name in tensors.keys() - others}, decoder)
    return config | {"quantization_config": _formats(tensors, _decoder_names(decoder))}


def _decoder_names(config: DecoderConfig) -> GgufNames:
    return GgufNames.of_decoder(config.names, config.num_layers if config.has_mtp else None)


def _unused_tensors(decoder: DecoderConfig, count: int) -> tuple[str, ...]:
    """Beginnings of the names of layers that predict further tokens, and of keys and values where others' are used."""
    layers, first = decoder.num_layers, decoder.num_layers + decoder.has_mtp
    later = (f"blk.{index}." for index in range(first, min(count, first + _MAX_MTP_LAYERS)))
    shared = range(layers - decoder.num_shared_layers, layers)
    return (*later, *(f"blk.{index}.attn_{part}" for index in shared for part in ("k.", "k_norm.", "v.")))


def _without_nulls(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _all_tensors(headers: list[GgufHeader]) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        if twins := tensors.keys() & header.tensors.keys():
            raise StartupError(f"{header.path}: tensor {shorten(min(twins))} is in another shard as well")
        tensors |= header.tensors
    return tensors


def _refuse_other_tensors(tensors: dict[str, GgufTensor], config: DecoderConfig) -> None:
    """Refuse a tensor that the model has no place for, such as a bias or factors of rope: it would change
    the output."""
    free = {spec.name for spec in expected_tensors(config)}
    names = _decoder_names(config)
    for name, tensor in tensors.items():
        found = names.hf_names(name, tensor.shape)
        if not found or not free.issuperset(found):
            raise StartupError(f"tensor {shorten(name)} has no place in a {config.architecture} of these metadata")
        free.difference_update(found)


def _formats(tensors: dict[str, GgufTensor], names: GgufNames) -> dict[str, Any]:
    """quantization_config: the names of matrices, by their type."""
    types: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.type_name in BLOCK_TYPES:
            modules = (module.removesuffix(".weight") for module in names.hf_names(name, tensor.shape))
            types.setdefault(tensor.type_name, []).extend(modules)
    return {"quant_method": "gguf", "types": types}


def _rope_factors(headers: list[GgufHeader]) -> dict[str, tuple[float, ...]]:
    """The content of one of ROPE_TENSORS, by name; empty if the files have none, or not all of one."""
    found: dict[str, tuple[float, ...]] = {}
    for header in headers:
        for name in frozenset().union(*ROPE_TENSORS) & header.tensors.keys():
            tensor = header.tensors[name]
            if tensor.type_name != "F32" or len(tensor.shape) != 1:
                raise StartupError(f"tensor {name} is {tensor.type_name} {list(tensor.shape)}; expected F32 [n]")
            with closing(open_tensors(header.path)) as file:
                found[name] = tuple(file.read(tensor.stored, lambda _: None).tolist())
    return found if found.keys() in ROPE_TENSORS else {}


_PREFIX = "general.sampling."


class _Setting(NamedTuple):
    name: str
    """In generation_config.json."""
    default: float
    """llama.cpp's; the models' authors and users of GGUF files tried them with it."""
    highest: float = math.inf
    """llama.cpp takes values beyond 0 and this one as these."""


_SETTINGS = {
    "temp": _Setting("temperature", 0.8),
    "top_k": _Setting("top_k", 40),
    "top_p": _Setting("top_p", 0.95, highest=1.0),
    "min_p": _Setting("min_p", 0.05, highest=1.0),
    "penalty_repeat": _Setting("repetition_penalty", 1.0),
    "xtc_probability": _Setting("xtc_probability", 0.0, highest=1.0),
    "xtc_threshold": _Setting("xtc_threshold", 0.1, highest=1.0),
}
_NOT_APPLIED = {"sequence": None, "mirostat": 0}
"""Keys that are not supported, each with the value that changes nothing."""


def sampling_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of generation_config.json, and the settings that are not applied, as texts. Raises StartupError."""
    others = {
        key: shorten(value)
        for key, neutral in _NOT_APPLIED.items()
        if (value := metadata.get(_PREFIX + key)) not in (None, neutral)
    }
    return {setting.name: _read(metadata, key, setting) for key, setting in _SETTINGS.items()} | others


def _read(metadata: Mapping[str, Any], key: str, setting: _Setting) -> float:
    value = metadata.get(_PREFIX + key, setting.default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise StartupError(f"{_PREFIX}{key} is {shorten(value)}; expected a finite number")
    bounded = min(max(value, 0), setting.highest)
    return round(bounded) if isinstance(setting.default, int) else float(f"{bounded:.6g}")  # a float32 in the file
