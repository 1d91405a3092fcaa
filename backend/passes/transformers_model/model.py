"""Loads a model of transformers for serving over the paged cache, and refuses unsupported models by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from penstock.backend.checkpoint.config_json import choose_dtype
from penstock.backend.checkpoint.files.json_file import read_json_object, shorten
from penstock.backend.checkpoint.files.layout import CONFIG_FILE
from penstock.backend.checkpoint.tensor_files.opening import count_rows, fit_vocab_size
from penstock.backend.checkpoint.tensor_files.unplaced import describe_unplaced, is_beside_decoder, is_buffer
from penstock.backend.checkpoint.weights import open_tensor_files, read_dequantized
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.backend.passes.cpu.in_torch.paged_cache import KvShape
from penstock.backend.passes.transformers_model.attention import (
    NAME,
    ShapeProbe,
    UnsupportedAttentionError,
    attention_by,
    register,
)
from penstock.backend.passes.transformers_model.linear_attention import (
    SlotStates,
    StateShape,
    StepStates,
    check_layers,
    probe_states,
    run_layers_by_row,
    states_by,
)
from penstock.shm.messages import MAX_CONTEXT_TOKENS

_LINEAR = "linear_attention"
_LAYER_TYPES = {"full_attention", "sliding_attention", _LINEAR}
_NO_KV = KvShape(0, 0, 0)
_DEQUANTIZED = {"compressed-tensors": "CompressedTensorsConfig", "mxfp4": "Mxfp4Config"}
"""Quantisation method → transformers' class for it, of those that it dequantises on any device."""
_FP8 = "fp8"
"""transformers misreads matrices that are no multiple of a block, such as DeepSeek V3's, so we dequantise this one."""
_PROBE_TOKENS = 9
_PROBE_TOLERANCE = 0.02
"""Share of the largest logit: bf16 differs by this much between two orders of summation."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from the config.json of a model that can be served."""

    config: Any
    """A `PreTrainedConfig`."""
    dtype: torch.dtype
    vocab_size: int
    embedding_rows: int
    """Rows of the checkpoint's embedding, at least vocab_size. Tokens of rows beyond vocab_size cannot be sampled."""
    weight_bytes: int
    """Bytes of all parameters."""
    max_context_tokens: int
    kv_shapes: tuple[KvShape, ...]
    """One for each layer; zeros for one without attention."""
    state_shapes: Mapping[int, StateShape]
    """By the index of each layer that keeps a state."""
    quant_method: str | None = None
    """The method of the checkpoint's weights, which are dequantised while they load; None if they are plain."""


def read_facts(model_dir: Path, dtype: str, max_context_tokens: int | None) -> ModelFacts:
    """Read config.json by transformers' own class for it. Raises StartupError."""
    transformers = _import_transformers()
    path = model_dir / CONFIG_FILE
    read_json_object(path)  # a clear error for what is no JSON at all
    config = _read_config(path, transformers)
    method = _take_quant_method(config, path)
    text = config.get_text_config(decoder=True)
    if (reason := _why_not(config, text, transformers)) is not None:
        raise StartupError(f"{path}: {reason}; the forward pass transformers cannot serve it")
    offered = getattr(text, "max_position_embeddings", None)
    if not isinstance(offered, int) or not 1 <= offered <= MAX_CONTEXT_TOKENS:
        raise StartupError(
            f"{path}: max_position_embeddings is {shorten(offered)}; it must be 1 to {MAX_CONTEXT_TOKENS}"
        )
    if max_context_tokens is not None and not 1 <= max_context_tokens <= offered:
        raise StartupError(
            f"--max-context is {max_context_tokens}; this model supports 1 to {offered}: lower --max-context"
        )
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    chosen = choose_dtype(dtype, Dtype.of(own)).in_torch
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text] * len(kinds)
    model = _model_without_memory(config, chosen)
    embedding_rows = text.vocab_size
    names = _embedding_names(model)
    rows = count_rows(model_dir, names)
    if rows is not None and rows != len(model.get_input_embeddings().weight):
        text.vocab_size = fit_vocab_size(model_dir, text.vocab_size, names)
        embedding_rows = max(rows, text.vocab_size)
        model = _model_without_memory(config, chosen)
    return ModelFacts(
        config,
        chosen,
        text.vocab_size,
        embedding_rows,
        sum(parameter.numel() for parameter in model.parameters()) * chosen.itemsize,
        max_context_tokens or offered,
        tuple(_NO_KV if kind == _LINEAR else _kv_shape(layer) for kind, layer in zip(kinds, layers, strict=True)),
        _state_shapes(model, text, chosen, path) if _LINEAR in kinds else {},
        method,
    )


def _read_config(path: Path, transformers: Any) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds
        raise StartupError(f"{path}: transformers {transformers.__version__} cannot read it: {_line(error)}") from None


def _take_quant_method(config: Any, path: Path) -> str | None:
    """Make config that of the dequantised model; return how its checkpoint is quantised. Raises StartupError."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    del config.quantization_config
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method not in (_FP8, *_DEQUANTIZED):
        raise StartupError(
            f"{path}: quantization_config.quant_method is {shorten(method)}; the forward pass transformers dequantises "
            f"{', '.join((_FP8, *_DEQUANTIZED))}"
        )
    return str(method)


def _state_shapes(model: Any, text: Any, dtype: torch.dtype, path: Path) -> Mapping[int, StateShape]:
    """Raises StartupError."""
    try:
        shapes = probe_states(model, text.hidden_size, dtype)
    except Exception as error:  # the model's code may raise anything
        raise StartupError(f"{path}: its linear attention cannot be served: {_line(error)}") from error
    if list(shapes) != [layer for layer, kind in enumerate(text.layer_types) if kind == _LINEAR]:
        raise StartupError(f"{path}: layers {shorten(list(shapes))} keep a state; layer_types says otherwise")
    return shapes


def _model_without_memory(config: Any, dtype: torch.dtype) -> Any:
    register()
    with torch.device("meta"):
        return _import_transformers().AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)


def _embedding_names(model: Any) -> tuple[str, ...]:
    """Names that checkpoints have for the embedding: with and without the prefix of a model with a head."""
    embedding = model.get_input_embeddings().weight
    name = next(name for name, parameter in model.named_parameters() if parameter is embedding)
    return name, name.removeprefix(f"{model.base_model_prefix}.")


def load_model(model_dir: Path, facts: ModelFacts, device: torch.device) -> Module:
    """The model with its weights on the device, checked there against its own attention on a few tokens. Raises
    StartupError."""
    transformers = _import_transformers()
    register()
    with ExitStack() as files:
        open_tensor_files(model_dir, files)  # checks headers, in which the library lets a tensor have two places
    transformers.utils.logging.disable_progress_bar()
    # It warns that it uses the checkpoint's settings, which is what we want.
    warnings.filterwarnings("ignore", "You passed `quantization_config` or equivalent")
    options, model_class = _loading_options(model_dir, facts, transformers), transformers.AutoModelForCausalLM
    if "state_dict" in options:  # the automatic class would look for files
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(facts.config)]
    try:
        model, info = model_class.from_pretrained(
            None if "state_dict" in options else model_dir,
            dtype=facts.dtype,
            attn_implementation=NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except Exception as error:  # noqa: BLE001 - as in `read_facts`
        raise StartupError(f"transformers cannot load {model_dir}: {_line(error)}") from None
    if info["missing_keys"]:
        raise StartupError(f"{model_dir}: tensor {min(info['missing_keys'])} is missing")
    for name, stored, expected in info["mismatched_keys"]:
        raise StartupError(
            f"{model_dir}: tensor {name} has shape {list(stored)}; config.json makes it {list(expected)}"
        )
    num_layers = len(facts.kv_shapes)
    for name in sorted(info["unexpected_keys"]):
        if not is_buffer(name) and not is_beside_decoder(num_layers, (), name):
            raise StartupError(f"{model_dir}: {describe_unplaced(name, type(model).__name__)}")
    if facts.embedding_rows > facts.vocab_size:
        model.resize_token_embeddings(facts.vocab_size)
    try:
        model.eval().to(device)
    except torch.OutOfMemoryError as error:
        raise StartupError(f"{model_dir}: its weights do not fit the GPU: {_line(error)}") from error
    where = f"{model_dir / CONFIG_FILE}: {type(model).__name__}"
    _check_states(model, facts, where, device)
    run_layers_by_row(model)
    _check(model, facts, where, device)
    return model  # type: ignore[no-any-return]


def _loading_options(model_dir: Path, facts: ModelFacts, transformers: Any) -> dict[str, Any]:
    config = _read_config(model_dir / CONFIG_FILE, transformers)
    config.get_text_config(decoder=True).vocab_size = facts.embedding_rows
    if facts.quant_method is None:
        return {"config": config}
    if facts.quant_method == _FP8:
        del config.quantization_config
        return {"config": config, "state_dict": read_dequantized(model_dir, facts.dtype)}
    dequantizer = getattr(transformers, _DEQUANTIZED[facts.quant_method])
    return {"config": config, "quantization_config": dequantizer(dequantize=True)}


def run_model(model: Module, input_ids: Tensor, positions: Tensor, logit_tokens: Tensor) -> Tensor:
    """Logits [L, vocab_size] fp32 of some of T tokens; input_ids and positions [T], logit_tokens [L]."""
    output = model(
        input_ids=input_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=logit_tokens,
    )
    logits: Tensor = output.logits[0].float()
    return logits


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise StartupError(f"the forward pass transformers needs penstock[transformers]: {error}") from None
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()  # its reports have many lines; the errors raised here have one
    return transformers


def _why_not(config: Any, text: Any, transformers: Any) -> str | None:
    """Why a model cannot be served over paged attention, judging by its configuration and class."""
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return f"model_type {shorten(config.model_type)} is no decoder of transformers"
    if config.is_encoder_decoder:
        return "it is an encoder with a decoder"
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds == {_LINEAR}:
        return f"{model_class.__name__} keeps a state and no KV cache"
    if model_class._is_stateful and _LINEAR not in kinds:
        return f"{model_class.__name__} keeps a state that is no linear attention"
    # Models with a state do not say that they support the interface; the check at load shows whether they do.
    if not (model_class._supports_attention_backend or (model_class._is_stateful and model_class._supports_sdpa)):
        return f"{model_class.__name__} does not let its attention be replaced"
    if kinds - _LAYER_TYPES:
        return f"layer_types has {', '.join(sorted(kinds - _LAYER_TYPES))}"
    for key in ("num_kv_shared_layers", "attention_chunk_size"):
        if getattr(text, key, None):
            return f"{key} is {shorten(getattr(text, key))}"
    return None


def _kv_shape(text: Any) -> KvShape:
    """The shape by the usual names in configurations; `_check` compares it with the layers' actual values."""
    heads = text.num_attention_heads
    if (latent := getattr(text, "v_head_dim", None)) is not None and getattr(text, "qk_nope_head_dim", None):
        return KvShape(heads, text.qk_nope_head_dim + text.qk_rope_head_dim, latent)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return KvShape(getattr(text, "num_key_value_heads", None) or heads, head_dim, head_dim)


@torch.inference_mode()
def _check_states(model: Any, facts: ModelFacts, where: str, device: torch.device) -> None:
    """Raises StartupError if a layer's state does not determine how its sequence continues."""
    if not facts.state_shapes:
        return
    hidden_size = facts.config.get_text_config(decoder=True).hidden_size
    try:
        difference = check_layers(model, facts.state_shapes, hidden_size, facts.dtype, device)
    except Exception as error:  # the model's code may raise anything
        raise StartupError(f"{where} cannot be served: {type(error).__name__}: {_line(error)}") from error
    if not difference <= _PROBE_TOLERANCE:
        raise StartupError(
            f"{where} cannot be served: in several steps a layer with a state differs by {difference:.3g} of its output"
        )


@torch.inference_mode()
def _check(model: Any, facts: ModelFacts, where: str, device: torch.device) -> None:
    """Compare a short prompt's logits with those of the model's own attention. Raises StartupError.

    So a model that does more in its attention than it passes to its attention function is refused.
    """
    everything = torch.arange(_PROBE_TOKENS, device=device)
    ids = everything * 7 % facts.vocab_size
    probe = ShapeProbe()
    try:
        states = SlotStates(facts.state_shapes, 1, device)
        one_row = StepStates(states, [0, _PROBE_TOKENS], torch.zeros(1, dtype=torch.int64, device=device))
        with attention_by(probe), states_by(one_row):
            ours = run_model(model, ids, everything, everything)
        model.set_attn_implementation("eager")
        theirs = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
        model.set_attn_implementation(NAME)
    except UnsupportedAttentionError as error:
        raise StartupError(f"{where} cannot be served: {error}") from None
    except Exception as error:  # the model's code may raise anything
        raise StartupError(f"{where} cannot be served: {type(error).__name__}: {_line(error)}") from error
    expected = {layer: shape for layer, shape in enumerate(facts.kv_shapes) if shape != _NO_KV}
    if probe.kv_shapes != expected:
        raise StartupError(
            f"{where} cannot be served: its layers cache {shorten(probe.kv_shapes)}; "
            f"its configuration gives {shorten(expected)}"
        )
    if ours.shape != theirs.shape:
        raise StartupError(f"{where} cannot be served: logits of shape {list(ours.shape)}, not {list(theirs.shape)}")
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    if not difference <= _PROBE_TOLERANCE * max(largest, 1e-3):
        raise StartupError(
            f"{where} cannot be served: over paged attention its logits differ by {difference:.3g} from its own, of at "
            f"most {largest:.3g}"
        )


@contextmanager
def foreign_code(model_dir: Path) -> Iterator[None]:
    """Raises StartupError for whatever a model's own code raises."""
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(
            f"{model_dir / CONFIG_FILE}: transformers' code for this model fails: "
            f"{type(error).__name__}: {_line(error)}"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
