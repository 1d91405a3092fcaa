"""Describes a model, from config.json, its tokenizer's files and the headers of its tensors."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from penstock.backend.checkpoint.config.architectures.names import SUPPORTED_ARCHITECTURES, find_architecture
from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.encoders.decoder_heads import read_pooled_decoder
from penstock.backend.checkpoint.encoders.read_config import read_encoder, with_common_names
from penstock.backend.checkpoint.encoders.tasks import find_task
from penstock.backend.checkpoint.encoders.weights import open_encoder
from penstock.backend.checkpoint.files.generation_config import read_generation_defaults
from penstock.backend.checkpoint.files.json_file import read_json_object, shorten
from penstock.backend.checkpoint.files.layout import CONFIG_FILE, GGUF_SUFFIX, SINGLE_FILE, weight_files
from penstock.backend.checkpoint.formats.numbers.ggml import BLOCK_TYPES
from penstock.backend.checkpoint.formats.quant_method import with_own_file
from penstock.backend.checkpoint.gguf.header import read_header
from penstock.backend.checkpoint.hub import resolve_small_files
from penstock.backend.checkpoint.tensor_files.safetensors_file import SafetensorsFile
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import IBatchedForwardPass, PassOptions, PassSpec
from penstock.backend.model_names import HubName, parse_model_name
from penstock.backend.passes.decoder.forward_pass import DecoderPass
from penstock.backend.passes.encoder.forward_pass import EncoderPass
from penstock.backend.passes.transformers_model.forward_pass import TransformersPass
from penstock.commands.inspect_model.config_fields import Quantization, read_fields
from penstock.frontend.generation.models.served_model import (
    find_unnamed_ends,
    model_syntax_of,
    named_tokens,
    shown_sampling,
)
from penstock.frontend.parsing.reasoning import ReasoningFormat
from penstock.frontend.schemas.answers import EndToken, SamplingDefaults
from penstock.frontend.text.tokenizer import ModelTokenizer


class TensorHeader(NamedTuple):
    dtype: str
    """The dtype's name in the file: "BF16", "F8_E4M3", "I32", and for GGUF "Q4_K"."""
    shape: tuple[int, ...]
    num_bytes: int


class WeightFiles(NamedTuple):
    tensors: dict[str, TensorHeader]
    num_files: int
    missing_files: tuple[str, ...] = ()
    """Files that the index names and the directory lacks."""


def read_directory(model_dir: Path) -> WeightFiles:
    """The tensors of model.safetensors, of the index's existing shards, or of the GGUF files behind the directory.

    Raises StartupError for a bad file.
    """
    if ggufs := sorted(model_dir.glob(f"*{GGUF_SUFFIX}")):
        return WeightFiles(
            {
                name: TensorHeader(tensor.type_name, tensor.shape, tensor.stored.num_bytes)
                for path in ggufs
                for name, tensor in read_header(path).tensors.items()
            },
            len(ggufs),
        )
    names = weight_files(model_dir) or (SINGLE_FILE,)
    present = [name for name in names if (model_dir / name).exists()]
    tensors: dict[str, TensorHeader] = {}
    for name in present:
        with closing(SafetensorsFile(model_dir / name)) as file:
            for tensor, stored in file.tensors.items():
                tensors[tensor] = TensorHeader(stored.dtype, stored.shape, stored.num_bytes)
    return WeightFiles(tensors, len(names), tuple(name for name in names if name not in present))


def read_hub(model: str, revision: str) -> WeightFiles:
    """The tensors of a hub model's safetensors files; only their headers are fetched. Raises StartupError."""
    import httpx2
    from huggingface_hub import errors, get_safetensors_metadata

    try:
        metadata = get_safetensors_metadata(model, revision=revision)
    except errors.NotASafetensorsRepoError:
        raise StartupError(f"the hub's model {model} has no safetensors files") from None
    except (errors.SafetensorsParsingError, errors.HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise StartupError(f"the headers of the hub's model {model} cannot be read: {reason}") from None
    tensors = {
        name: TensorHeader(info.dtype, tuple(info.shape), info.data_offsets[1] - info.data_offsets[0])
        for file in metadata.files_metadata.values()
        for name, info in file.tensors.items()
    }
    return WeightFiles(tensors, len(metadata.files_metadata))


_PACKED_SUFFIXES = ("qweight", "weight_packed", "_blocks")
"""Tensors that hold several weights in each element."""
_OTHER_DATA = (
    *("scale", "scales", "scale_inv", "scale_2", "biases", "zero_point", "qzeros", "g_idx", "weight_shape"),
    *("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4"),
)
"""Endings of the names of tensors that belong to quantised weights and are not parameters."""


class ChatDescription(Struct, frozen=True):
    """What rendering the chat template shows."""

    parallel_calls: bool
    """Whether a message may have several calls. Others are written as several messages."""
    reasoning_marks: tuple[str, str] | None
    part_roles: tuple[str, ...]
    """Roles whose content the template takes in parts; others receive the texts joined."""
    developer_role: bool
    """Whether the template has the role; if not, its messages are system messages."""


class _Texts(NamedTuple):
    """What the tokenizer's files and generation_config.json say. error is why one of them cannot be used, if so."""

    tool_format: str | None = None
    reasoning_format: str | None = None
    chat: ChatDescription | None = None
    end_tokens: tuple[EndToken, ...] = ()
    default_sampling: SamplingDefaults | None = None
    error: str | None = None


class ModelDescription(Struct, frozen=True):
    """A model's description. Unknown values are None. Bytes are those of the files."""

    model: str
    architecture: str | None
    not_served_because: str | None
    """None if this version serves the model on the CPU; otherwise the reason."""
    task: str | None
    """As `backend --task auto` chooses it."""
    input_modalities: tuple[str, ...]
    vectors: dict[str, int]
    """Kind of vector that the model returns instead of tokens → numbers of each vector."""
    layers: int | None
    hidden_size: int | None
    intermediate_size: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocab_size: int | None
    context_tokens: int | None
    window_tokens: int | None
    """The sliding window, of all layers or of some."""
    experts: int
    active_experts: int
    """Experts of a layer that each token uses."""
    quantization: str | None
    parameters: int
    active_parameters: int
    """Parameters that a token uses: without the experts that it is not routed to."""
    weight_dtypes: dict[str, int]
    """Bytes by dtype, largest first."""
    weight_bytes: int
    memory_bytes: int | None
    """Memory of the loaded weights on the CPU, with the default options."""
    weight_files: int
    missing_files: tuple[str, ...]
    kv_bytes_per_token: dict[str, int]
    """By KV dtype, as `--kv-dtype` takes it."""
    state_bytes_per_sequence: int
    """Memory of layers that keep a state instead of keys and values."""
    tool_format: str | None
    """Name of the option --tool-parser, the first mark of a call, or generic."""
    reasoning_format: str | None
    chat: ChatDescription | None
    """None without a chat template."""
    end_tokens: tuple[EndToken, ...]
    default_sampling: SamplingDefaults | None
    tokenizer_error: str | None


def describe_named_model(model: str, revision: str | None, *, by_own_code: bool = False) -> ModelDescription:
    """Describe the model that --model names, served by our code or by transformers'.

    Only small files of a hub model are downloaded. Raises StartupError.
    """
    name, model_dir = parse_model_name(model), resolve_small_files(model, revision)
    is_local = True
    if isinstance(name, HubName) and not any(model_dir.glob(f"*{GGUF_SUFFIX}")):
        files, is_local = read_hub(name.repository, revision or "main"), False
    else:
        files = read_directory(model_dir)
    return describe_model(model, model_dir, files, is_local=is_local, by_own_code=by_own_code)


def describe_model(
    model: str, model_dir: Path, files: WeightFiles, *, is_local: bool, by_own_code: bool = False
) -> ModelDescription:
    """Describe a model. model_dir has the small files, and with is_local the weights.

    by_own_code: transformers' code serves it. Raises StartupError if config.json cannot be read.
    """
    path = model_dir / CONFIG_FILE
    values = dict(with_own_file(read_json_object(path), model_dir))
    fields = read_fields(_common_names(values), path)
    architecture = _architecture(values)
    quantization = fields.quantization_config
    bits = quantization.bits_per_weight if quantization is not None else 8
    parameters, expert_parameters = count_parameters(files.tensors, bits)
    unused = expert_parameters * (fields.experts - fields.active_experts) // fields.experts if fields.experts else 0
    dtypes = Counter[str]()
    for tensor in files.tensors.values():
        dtypes[tensor.dtype] += tensor.num_bytes
    if by_own_code:
        reason, task, spec = _served_by_own_code(model_dir)
    else:
        reason, task, spec = _served(model_dir, architecture, checks_weights=is_local and not files.missing_files)
    # The formula holds for architectures whose layers all have attention, as all of ours do.
    kv_values = fields.kv_values_per_token if spec is None and architecture in SUPPORTED_ARCHITECTURES else None
    if reason is None and files.missing_files:
        reason = f"{len(files.missing_files)} of {files.num_files} weight files are missing: {files.missing_files[0]}"
    texts = _read_texts(model_dir)
    heads, kv_heads = fields.num_attention_heads, fields.num_key_value_heads or fields.num_attention_heads
    return ModelDescription(
        model=model,
        architecture=architecture,
        not_served_because=reason if reason is not None else texts.error,
        task=task,
        input_modalities=("text", "image") if spec is not None and spec.max_picture_bytes else ("text",),
        vectors={} if spec is None else dict(spec.pooled),
        layers=fields.num_hidden_layers,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.head_dim or (fields.hidden_size // heads if fields.hidden_size and heads else None),
        vocab_size=fields.vocab_size,
        context_tokens=fields.max_position_embeddings,
        window_tokens=fields.sliding_window,
        experts=fields.experts,
        active_experts=fields.active_experts,
        quantization=_quantization_text(quantization, dtypes),
        parameters=parameters,
        active_parameters=parameters - unused,
        weight_dtypes=dict(dtypes.most_common()),
        weight_bytes=sum(dtypes.values()),
        memory_bytes=None if spec is None else spec.weight_bytes,
        weight_files=files.num_files,
        missing_files=files.missing_files,
        kv_bytes_per_token=dict(spec.kv_bytes_per_token) if spec else {"bf16": 2 * kv_values} if kv_values else {},
        state_bytes_per_sequence=0 if spec is None else spec.state_bytes_per_sequence,
        tool_format=texts.tool_format,
        reasoning_format=texts.reasoning_format,
        chat=texts.chat,
        end_tokens=texts.end_tokens if task == "generate" else (),
        default_sampling=texts.default_sampling if task == "generate" else None,
        tokenizer_error=texts.error,
    )


def _quantization_text(quantization: Quantization | None, dtypes: Counter[str]) -> str | None:
    """Describe the quantisation; for a GGUF file, the types of its blocks, those with the most bytes first."""
    if quantization is None or quantization.quant_method != "gguf":
        return None if quantization is None else quantization.text
    return ", ".join(name for name, _ in dtypes.most_common() if name in BLOCK_TYPES) or None


def count_parameters(tensors: dict[str, TensorHeader], packed_bits: int) -> tuple[int, int]:
    """All parameters, and those of routed experts. A packed tensor has 8 / packed_bits of them in a byte."""
    total = in_experts = 0
    for name, tensor in tensors.items():
        if name.endswith(_OTHER_DATA):
            continue
        has_bits = tensor.dtype == "U32" or (tensor.dtype == "U8" and packed_bits < 8)
        is_packed = has_bits or name.endswith(_PACKED_SUFFIXES)
        count = tensor.num_bytes * 8 // packed_bits if is_packed else prod(tensor.shape)
        total += count
        if ".experts." in name:
            in_experts += count
    return total, in_experts


def _common_names(values: dict[str, Any]) -> dict[str, Any]:
    try:
        return with_common_names(values)
    except StartupError:  # an encoder that is not supported, which `_served` says
        return values


def _architecture(values: dict[str, Any]) -> str | None:
    found = find_architecture(values)
    return None if found is None else str(found)


def _served(
    model_dir: Path, architecture: str | None, *, checks_weights: bool
) -> tuple[str | None, str | None, PassSpec | None]:
    """Return why the model is not served, if so; its task; and its pass's description.

    A decoder that is not ours is described by transformers' code.
    """
    task = spec = None
    try:
        found = find_task(model_dir)
        task = found.task
        if task == "generate" and architecture is not None and architecture not in SUPPORTED_ARCHITECTURES:
            reason, _, spec = _served_by_own_code(model_dir)
            advice = "serve it with --forward-pass transformers" if reason is None else reason
            return f"the built-in decoder does not know {shorten(architecture)}: {advice}", task, spec
        pass_class: type[IBatchedForwardPass] = EncoderPass if found.is_encoder else DecoderPass
        spec = pass_class.describe(model_dir, PassOptions())
        if checks_weights and found.is_encoder:
            with open_encoder(model_dir, read_encoder(model_dir)):
                pass
        elif checks_weights:
            pooled = read_pooled_decoder(model_dir, "auto", None)
            open_weights(model_dir, read_decoder_config(model_dir) if pooled is None else pooled.config).close()
    except StartupError as error:
        return str(error), task, spec
    return None, task, spec


def _served_by_own_code(model_dir: Path) -> tuple[str | None, str | None, PassSpec | None]:
    """Like `_served`. Obstacles that only loading the weights would show are not checked."""
    try:
        return None, "generate", TransformersPass.describe(model_dir, PassOptions())
    except StartupError as error:
        return str(error), "generate", None


def _read_texts(model_dir: Path) -> _Texts:
    try:
        tokenizer = ModelTokenizer.load(model_dir)
        defaults = read_generation_defaults(model_dir)
    except Exception as error:  # noqa: BLE001 - the tokenizer library raises plain Exception for a bad file
        return _Texts(error=" ".join(str(error).split()))
    syntax, named = model_syntax_of(tokenizer), defaults.eos_token_ids
    return _Texts(
        syntax.tools_name,
        None if syntax.reasoning is None else syntax.reasoning.name,
        _describe_chat(tokenizer, syntax.reasoning),
        tuple(named_tokens((*named, *find_unnamed_ends(named, tokenizer)), tokenizer)),
        shown_sampling(defaults.sampling),
    )


def _describe_chat(tokenizer: ModelTokenizer, reasoning: ReasoningFormat | None) -> ChatDescription | None:
    if tokenizer.chat_template is None:
        return None
    traits = tokenizer.chat_template.traits
    return ChatDescription(
        parallel_calls=traits.takes_calls_together,
        reasoning_marks=None if reasoning is None else (reasoning.opening, reasoning.closing),
        part_roles=tuple(sorted(traits.part_roles)),
        developer_role=traits.has_developer,
    )
