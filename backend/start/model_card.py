"""The model card that frontends receive, and the fingerprint that identifies a model and its settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec

from penstock.backend.checkpoint.encoders.sentence_transformers import read_modules
from penstock.backend.checkpoint.files.generation_config import read_generation_defaults
from penstock.backend.checkpoint.files.json_file import read_json_object, shorten
from penstock.backend.checkpoint.files.layout import CONFIG_FILE
from penstock.backend.checkpoint.fingerprint import WEIGHTS_SUFFIXES, FilesHash
from penstock.backend.checkpoint.formats.quant_method import declared_method, with_own_file
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassSpec
from penstock.backend.kv_cache.budget.kv_plan import KvPlan
from penstock.backend.kv_cache.budget.whole_plan import WholePlan
from penstock.backend.sampling.defaults import SAMPLING_SETTING, read_default_sampling
from penstock.shm.messages import MAX_CARD_BYTES, Adapter, ModelCard, PooledKind, PooledWidth, Sampling, encode

logger = logging.getLogger("penstock.backend")

_TEXT_SUFFIXES = (".json", ".jinja")


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names that requests may use."""

    model_id: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()


def make_card(
    names: ModelNames,
    model_dir: Path,
    spec: PassSpec,
    plan: KvPlan | WholePlan,
    max_waiting: int,
    settings: Mapping[str, str],
) -> ModelCard:
    """Make the card. settings are the other settings that change the tokens, by name: the pass, dtypes.

    Raises StartupError for a field out of bounds.
    """
    settings = {**settings, "KV dtype": plan.kv_dtype}
    modules = read_modules(model_dir) if spec.pooled else None
    generation = read_generation_defaults(model_dir)
    if generation.not_applied:
        named = ", ".join(f"{key} to {shorten(value)}" for key, value in generation.not_applied.items())
        logger.warning("the model's files set %s, which is not applied", named)
    sampling = _default_sampling(generation.sampling, settings.get(SAMPLING_SETTING, "{}"), spec)
    card = ModelCard(
        model_id=names.model_id,
        model_dir=str(model_dir.resolve()),
        created=max(0, int((model_dir / CONFIG_FILE).stat().st_mtime)),
        vocab_size=spec.vocab_size,
        max_context_tokens=plan.max_context_tokens,
        max_waiting=max_waiting,
        eos_token_ids=generation.eos_token_ids,
        default_sampling=sampling,
        fingerprint=fingerprint(model_dir, " ".join(settings.values())),
        quantization=_quantization(spec, model_dir),
        generates=spec.generates,
        pooled=_pooled(spec),
        normalizes=modules is not None and modules.normalizes,
        aliases=names.aliases,
        traits=(*settings.items(), *_file_traits(model_dir)),
        adapters=names.adapters,
        max_picture_bytes=spec.max_picture_bytes,
    )
    encoded = encode(card)
    if len(encoded) > MAX_CARD_BYTES:
        raise StartupError(
            f"the model's name, aliases and adapters take {len(encoded)} bytes; the limit is {MAX_CARD_BYTES}"
        )
    try:
        return msgspec.msgpack.decode(encoded, type=ModelCard)
    except msgspec.ValidationError as error:
        raise StartupError(f"the model cannot be announced to frontends: {error}") from None


def _default_sampling(of_files: Sampling, option: str, spec: PassSpec) -> Sampling:
    """Raises StartupError."""
    chosen = read_default_sampling(option)
    sampling = msgspec.structs.replace(of_files, **chosen)
    name = sampling.llama_cpp_field
    if name is None or spec.has_llama_cpp_sampling:
        return sampling
    if name in chosen:
        raise StartupError(f"--default-sampling: {name}: this forward pass samples without it; the CPU's know it")
    logger.warning("the model's files set %s, which this forward pass does not apply", name)
    return msgspec.structs.replace(sampling, xtc_probability=0.0)


def _pooled(spec: PassSpec) -> tuple[PooledWidth, ...]:
    """ "embed" comes first, if there is one."""
    kinds = sorted(get_args(PooledKind), key=lambda kind: kind != "embed")
    return tuple(PooledWidth(kind, spec.pooled[kind]) for kind in kinds if kind in spec.pooled)


def _quantization(spec: PassSpec, model_dir: Path) -> str:
    """The form into which --quantize converted the weights, else the checkpoint's quantisation method, else "none"."""
    if spec.quantization != "none":
        return spec.quantization
    return declared_method(with_own_file(read_json_object(model_dir / CONFIG_FILE), model_dir)) or "none"


def fingerprint(model_dir: Path, settings: str) -> str:
    """A hash that differs if the text for a seed may differ: by settings, configuration or weights."""
    return f"fp_{_hash_of(model_dir, (*_TEXT_SUFFIXES, *WEIGHTS_SUFFIXES), settings)}"


def _file_traits(model_dir: Path) -> list[tuple[str, str]]:
    """Parts of the fingerprint, which show whether weights, tokenizer or configuration differ."""
    return [
        ("weights", _hash_of(model_dir, WEIGHTS_SUFFIXES)),
        ("tokenizer", _hash_of(model_dir, _TEXT_SUFFIXES, only="tokenizer")),
        ("configuration", _hash_of(model_dir, _TEXT_SUFFIXES)),
    ]


def _hash_of(model_dir: Path, suffixes: tuple[str, ...], settings: str = "", only: str = "") -> str:
    """Hash the settings and the files with these suffixes whose names begin with only."""
    found = FilesHash(settings)
    for path in sorted(model_dir.iterdir()):
        if path.suffix in suffixes and path.name.startswith(only) and path.is_file():
            found.add(path)
    return found.hexdigest()[:12]
