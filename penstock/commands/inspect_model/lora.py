"""Describes a LoRA adapter, from its adapter_config.json and the header of its tensors."""

from __future__ import annotations

from contextlib import closing
from math import prod
from pathlib import Path

from msgspec import Struct

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.files.layout import CONFIG_FILE as MODEL_CONFIG_FILE
from penstock.backend.checkpoint.hub import resolve_small_files
from penstock.backend.checkpoint.lora.peft_adapter import WEIGHTS_FILE, PeftAdapter
from penstock.backend.checkpoint.lora.peft_config import CONFIG_FILE, PeftConfig, read_peft_config
from penstock.backend.checkpoint.tensor_files.safetensors_file import SafetensorsFile
from penstock.backend.errors import StartupError
from penstock.backend.start.shipped_models import SHIPPED_MODELS


class AdapterDescription(Struct, frozen=True):
    """An adapter's description. Unknown values are None."""

    adapter: str
    base_model: str | None
    """As the adapter's files name it."""
    checked_with: str | None
    """The model with which its tensors were compared."""
    not_served_because: str | None
    rank: int | None
    alpha: float | None
    rank_stabilised: bool
    """Its scale is alpha / √rank, not alpha / rank."""
    modules: tuple[str, ...]
    """Last parts of the names of the linears that it changes."""
    parameters: int
    weight_bytes: int


def is_adapter(model: str) -> bool:
    directory = Path(model).expanduser()
    return (directory / CONFIG_FILE).is_file() and not (directory / MODEL_CONFIG_FILE).exists()


def describe_adapter(directory: Path, base: str | None) -> AdapterDescription:
    """Describe the adapter.

    base is the model to compare it with; by default the one that the adapter names, if that is a directory here. Raises
    StartupError for files that cannot be read.
    """
    config: PeftConfig | None = None
    reason = None
    try:
        config = read_peft_config(directory)
    except StartupError as error:
        reason = str(error)
    named = None if config is None else config.base_model_name_or_path
    if base is None and named is not None and (Path(named) / MODEL_CONFIG_FILE).is_file():
        base = named
    if base is not None and reason is None:
        reason = _find_fault(directory, base)
    with closing(SafetensorsFile(directory / WEIGHTS_FILE)) as file:
        modules = {name.split(".lora_")[0].rpartition(".")[2] for name in file.tensors}
        return AdapterDescription(
            adapter=str(directory),
            base_model=named,
            checked_with=base,
            not_served_because=reason,
            rank=None if config is None else config.r,
            alpha=None if config is None else config.lora_alpha,
            rank_stabilised=config is not None and config.use_rslora,
            modules=tuple(sorted(modules)),
            parameters=sum(prod(tensor.shape) for tensor in file.tensors.values()),
            weight_bytes=sum(tensor.num_bytes for tensor in file.tensors.values()),
        )


def _find_fault(directory: Path, base: str) -> str | None:
    """Compare the tensors with base. Raises StartupError if base is not a model."""
    config = read_decoder_config(SHIPPED_MODELS.get(base) or resolve_small_files(base))
    try:
        with PeftAdapter(directory, config):
            return None
    except StartupError as error:
        return str(error)
