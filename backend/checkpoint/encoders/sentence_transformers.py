"""The sentence-transformers layout: modules.json and the files of its modules, which say how vectors are pooled."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from penstock.backend.checkpoint.encoders.encoder_config import Activation, HeadLayer, PoolingMode
from penstock.backend.checkpoint.files.json_file import convert, read_bytes, read_json_object, shorten
from penstock.backend.errors import StartupError
from penstock.shm.messages import MAX_CONTEXT_TOKENS

MODULES_FILE = "modules.json"
_TOKENIZER_FILE = "tokenizer_config.json"
_MAX_MODULES = 16
_PATH = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.\-]{0,100}/?)?")
_LENGTH_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)

_MODES: dict[str, PoolingMode] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "lasttoken": "lasttoken",
    "weightedmean": "weightedmean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
_MODE_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Older files have one key per mode. Several modes are concatenated in this order."""
_ACTIVATIONS: dict[str, Activation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}

_Size = Annotated[int, Meta(ge=1, le=1 << 20)]


class _Module(Struct, frozen=True):
    path: str
    type: str


class _Dense(Struct, frozen=True):
    in_features: _Size
    out_features: _Size
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str = "sentence_embedding"
    module_output_name: str | None = None
    use_residual: bool = False


class _Lengths(Struct, frozen=True):
    max_seq_length: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)] | None = None


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules after the transformer, in the order in which they run."""

    pooling: tuple[PoolingMode, ...] = ()
    dense: tuple[HeadLayer, ...] = ()
    """Their tensors are named by their folder: 2_Dense/linear.weight."""
    normalizes: bool = False
    is_splade: bool = False
    max_tokens: int | None = None


def read_modules(model_dir: Path) -> Modules | None:
    """None for a directory without a modules.json. Raises StartupError naming the file, the key and its value."""
    path = model_dir / MODULES_FILE
    if not path.is_file():
        return None
    try:
        listed = msgspec.json.decode(read_bytes(path), type=list[_Module])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StartupError(f"{path} is not a list of modules: {error}") from None
    if not 1 <= len(listed) <= _MAX_MODULES:
        raise StartupError(f"{path} lists {len(listed)} modules; 1 to {_MAX_MODULES} are supported")
    pooling: tuple[PoolingMode, ...] = ()
    dense: list[HeadLayer] = []
    normalizes = is_splade = False
    for module in listed:
        if not _PATH.fullmatch(module.path):
            raise StartupError(f"{path}: path is {shorten(module.path)}; it must be a folder beside the file, or empty")
        folder = model_dir / module.path
        match module.type.rpartition(".")[2]:
            case "Transformer" | "MLMTransformer":
                pass
            case "Pooling":
                pooling = _read_pooling(folder / "config.json")
            case "Dense":
                dense.append(_read_dense(folder / "config.json", module.path.rstrip("/")))
            case "Normalize":
                normalizes = True
            case "SpladePooling":
                _check_splade(folder / "config.json")
                is_splade = True
            case other:
                supported = "Transformer, Pooling, Dense, Normalize, MLMTransformer and SpladePooling"
                raise StartupError(f"{path}: type is {shorten(other)}; supported modules are {supported}")
    return Modules(pooling, tuple(dense), normalizes, is_splade, read_max_tokens(model_dir))


def read_max_tokens(model_dir: Path) -> int | None:
    """max_seq_length of the file that sentence-transformers keeps beside the transformer, or the tokenizer's
    model_max_length, where newer versions keep it. None if neither names a limit."""
    for name in _LENGTH_FILES:
        path = model_dir / name
        if path.is_file():
            stated = convert(read_json_object(path), _Lengths, path).max_seq_length
            if stated is not None:
                return stated
            break
    path = model_dir / _TOKENIZER_FILE
    length = read_json_object(path).get("model_max_length") if path.is_file() else None
    is_limit = type(length) is int and 1 <= length <= MAX_CONTEXT_TOKENS  # transformers writes 10^30 for none
    return length if is_limit else None


def _read_pooling(path: Path) -> tuple[PoolingMode, ...]:
    values = read_json_object(path)
    if values.get("include_prompt", True) is not True:
        raise StartupError(f"{path}: include_prompt is {shorten(values['include_prompt'])}; only true is supported")
    given = values.get("pooling_mode")
    if given is None:
        given = [mode for key, mode in _MODE_KEYS.items() if values.get(key)]
        unknown = [key for key in values if key.startswith("pooling_mode_") and key not in _MODE_KEYS and values[key]]
        if unknown:
            raise StartupError(f"{path}: {unknown[0]} is not a pooling mode; supported are {', '.join(_MODE_KEYS)}")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) and name in _MODES for name in names):
        raise StartupError(f"{path}: pooling_mode is {shorten(given)}; supported are {', '.join(_MODES)}")
    return tuple(_MODES[name] for name in names) or ("mean",)


def _read_dense(path: Path, folder: str) -> HeadLayer:
    config = convert(read_json_object(path), _Dense, path)
    activation = _ACTIVATIONS.get(config.activation_function.rpartition(".")[2])
    if activation is None:
        raise StartupError(
            f"{path}: activation_function is {shorten(config.activation_function)}; supported are "
            f"{', '.join(_ACTIVATIONS)}"
        )
    names = (config.module_input_name, config.module_output_name or config.module_input_name)
    if config.use_residual or names != ("sentence_embedding", "sentence_embedding"):
        raise StartupError(f"{path}: only a Dense of the sentence embedding without a residual is supported")
    bias = f"{folder}/linear.bias" if config.bias else None
    return HeadLayer(f"{folder}/linear.weight", bias, config.in_features, config.out_features, activation)


def _check_splade(path: Path) -> None:
    values = read_json_object(path)
    for key, supported in (("pooling_strategy", "max"), ("activation_function", "relu")):
        if values.get(key, supported) != supported:
            raise StartupError(f'{path}: {key} is {shorten(values[key])}; only "{supported}" is supported')
