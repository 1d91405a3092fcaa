"""The command: options, and the description of a model or a LoRA adapter as text or JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter
from msgspec import Struct

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.files.layout import CONFIG_FILE as MODEL_CONFIG_FILE
from penstock.backend.checkpoint.hub import resolve_small_files
from penstock.backend.checkpoint.tensor_files.lora_adapter import WEIGHTS_FILE, PeftAdapter
from penstock.backend.checkpoint.tensor_files.lora_config import CONFIG_FILE, PeftConfig, read_peft_config
from penstock.backend.checkpoint.tensor_files.safetensors_file import SafetensorsFile
from penstock.backend.errors import StartupError
from penstock.commands.inspect_model.description import ModelDescription, describe_named_model
from penstock.frontend.generation.models.served_model import describe_ends, describe_sampling
from penstock.process.failure import fail
from penstock.process.options import format_size


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
    config = read_decoder_config(resolve_small_files(base))
    try:
        with PeftAdapter(directory, config):
            return None
    except StartupError as error:
        return str(error)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Say what a model is, and whether it can be served."""

    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""
    forward_pass: Literal["auto", "transformers"] = "auto"  # noqa: S105 - no password
    """The forward pass that is to serve it: auto is ours, as with penstock serve."""
    base: str | None = None
    """Model whose tensors those of a LoRA adapter must fit. Default: the one that the adapter names, if that is a
    directory here."""
    json: Annotated[bool, Parameter(negative="")] = False
    """Print one JSON object."""


def inspect_model(model: str, /, *, options: InspectOptions = InspectOptions()) -> int:
    """Describe a directory, a GGUF file, a hub id, a demo model, or the directory of a LoRA adapter.

    The exit status is 0 if the model can be served, else 1.

    Parameters
    ----------
    model
        A directory, a GGUF file, a hub id, penstock-demo, penstock-demo-embed, or the directory of a LoRA adapter.
    """
    described: AdapterDescription | ModelDescription
    try:
        if is_adapter(model):
            described = describe_adapter(Path(model).expanduser(), options.base)
            name, lines = described.adapter, _lines_of_adapter(described)
        else:
            by_own_code = options.forward_pass == "transformers"  # noqa: S105 - no password
            described = describe_named_model(model, options.revision, by_own_code=by_own_code)
            name, lines = described.model, _lines(described)
    except StartupError as error:
        fail("penstock show", str(error))
    if options.json:
        print(msgspec.json.encode(described).decode())
    else:
        print(name)
        for title, text in lines:
            print(f"  {title:<14}{text}")
    sys.stdout.flush()
    return int(described.not_served_because is not None)


def _lines(model: ModelDescription) -> Iterator[tuple[str, str]]:
    yield "architecture", model.architecture or "not named"
    yield "served", "yes" if model.not_served_because is None else f"no: {model.not_served_because}"
    yield "task", model.task or "unknown"
    yield "reads", " and ".join(model.input_modalities)
    if model.vectors:
        yield "vectors", ", ".join(f"{kind} of {width:,}" for kind, width in model.vectors.items())
    window = "" if model.window_tokens is None else f", windows of {model.window_tokens:,} tokens"
    yield "layers", f"{_number(model.layers)}{window}"
    yield "heads", f"{_number(model.heads)} of {_number(model.head_dim)}, {_number(model.kv_heads)} for keys and values"
    widths = f"hidden {_number(model.hidden_size)}, MLP {_number(model.intermediate_size)}"
    yield "widths", f"{widths}, vocabulary {_number(model.vocab_size)}"
    if model.experts:
        yield "experts", f"{model.experts}, of which a token uses {model.active_experts}"
    yield "context", f"{_number(model.context_tokens)} tokens"
    active = "" if model.active_parameters == model.parameters else f", {model.active_parameters:,} active"
    yield "parameters", f"{model.parameters:,}{active}"
    dtypes = ", ".join(f"{dtype} {format_size(size)}" for dtype, size in model.weight_dtypes.items())
    yield "weights", f"{format_size(model.weight_bytes)}, files: {model.weight_files} ({dtypes or 'none here'})"
    if model.memory_bytes is not None:
        yield "in memory", format_size(model.memory_bytes)
    yield "quantisation", model.quantization or "none"
    if not model.kv_bytes_per_token and model.vectors:
        return
    kv = ", ".join(f"{size:,} in {dtype}" for dtype, size in model.kv_bytes_per_token.items())
    yield "KV cache", f"bytes a token: {kv or 'unknown'}"
    if model.state_bytes_per_sequence:
        yield "states", f"{format_size(model.state_bytes_per_sequence)} a sequence"
    yield from _lines_of_chat(model)
    if model.default_sampling is not None:
        yield "answers end", f"with {describe_ends(model.end_tokens)}" if model.end_tokens else "at max_tokens only"
        yield "sampling", f"{describe_sampling(model.default_sampling)}, unless a request says otherwise"


def _lines_of_chat(model: ModelDescription) -> Iterator[tuple[str, str]]:
    chat = model.chat
    together = "" if chat is None or chat.parallel_calls else ", one a message"
    yield "tool calls", "none" if model.tool_format is None else f"{model.tool_format}{together}"
    marks = "" if chat is None or chat.reasoning_marks is None else f", {' … '.join(chat.reasoning_marks)}"
    yield "reasoning", "none" if model.reasoning_format is None else f"{model.reasoning_format}{marks}"
    if chat is not None:
        parts = f"in parts for {', '.join(chat.part_roles)}" if chat.part_roles else "as one text"
        yield "messages", f"{parts}; developer {'has its own role' if chat.developer_role else 'is written as system'}"


def _lines_of_adapter(adapter: AdapterDescription) -> Iterator[tuple[str, str]]:
    yield "kind", "LoRA adapter, for --lora-modules"
    yield "base model", adapter.base_model or "not named"
    if adapter.not_served_because is not None:
        yield "served", f"no: {adapter.not_served_because}"
    elif adapter.checked_with is None:
        yield "served", "unknown: give its base model with --base, and its tensors are compared with it"
    else:
        yield "served", f"yes, with {adapter.checked_with}"
    alpha = "?" if adapter.alpha is None else f"{adapter.alpha:g}"
    yield "rank", f"{_number(adapter.rank)}, alpha {alpha}{', rank-stabilised' if adapter.rank_stabilised else ''}"
    yield "linears", ", ".join(adapter.modules) or "none"
    yield "parameters", f"{adapter.parameters:,}"
    yield "weights", format_size(adapter.weight_bytes)


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"
