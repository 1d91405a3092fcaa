"""Builds the vision part of a checkpoint by transformers: its tower and its projector, without the text model."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.backend.checkpoint.config.architectures.names import find_architecture
from penstock.backend.checkpoint.files.json_file import read_json_object, shorten
from penstock.backend.checkpoint.files.layout import CONFIG_FILE
from penstock.backend.checkpoint.formats.tensor_file import FLOAT_DTYPES, TensorFile
from penstock.backend.checkpoint.gguf.header import open_tensors
from penstock.backend.checkpoint.gguf.projector import PROJECTOR_FILE, VISION_KEY, is_rotated, projector_name
from penstock.backend.checkpoint.weights import open_tensor_files
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.vision.families import FAMILIES, VisionFamily

logger = logging.getLogger("penstock.backend")

_PATCHES = "v.patch_embd.weight"
_DIMENSIONS_OF_FRAMES = 5
"""Of weights for several frames, which files have one by one."""
_TEXT_PARTS = ("language_model", "text_model")
_SMALL_TEXT = {
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "vocab_size_per_layer_input": 8,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
}


def find_family(model_dir: Path, options: PassOptions, *, says_why: bool = False) -> VisionFamily | None:
    """None for a model without a vision part, and for one whose pictures are not taken. says_why: log the reason.
    Raises StartupError."""
    projector = model_dir / PROJECTOR_FILE
    values = read_json_object(model_dir / CONFIG_FILE)
    values = values.get(VISION_KEY, values)
    if not isinstance(values, dict) or not isinstance(values.get("vision_config"), dict):
        return None
    architecture = str(find_architecture(values))
    family = FAMILIES.get(architecture)
    if family is None:
        reason = f"of {shorten(architecture)} only the text model is supported"
    elif find_spec("transformers") is None:
        family, reason = None, "they need penstock[transformers]"
    elif projector.is_symlink() and not options.needs_pictures:
        try:
            with closing(open_tensors(projector)) as file:
                _projector_names(projector.readlink(), file, read_config(model_dir))
        except (StartupError, OSError) as error:
            family, reason = None, str(error)
    if family is None and says_why:
        logger.warning("pictures are not taken: %s", reason)
    return family


def read_config(model_dir: Path) -> Any:
    """transformers' config with a text model as small as it may be. Raises StartupError."""
    import transformers

    path = model_dir / CONFIG_FILE
    try:
        if (own := read_json_object(path).get(VISION_KEY)) is not None:
            return transformers.AutoConfig.for_model(**own)
        config: Any = transformers.AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config(decoder=True)
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config  # vision parts are stored plain
        text.pad_token_id = None
        for name, value in _SMALL_TEXT.items():
            if hasattr(text, name):
                setattr(text, name, value)
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:1]
        if hasattr(config, "audio_config"):
            config.audio_config = None
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds
        raise StartupError(f"{path}: its vision part cannot be read: {_line(error)}") from None
    return config


def empty_model(config: Any) -> Any:
    """The vision part without memory."""
    import transformers

    try:
        with torch.device("meta"):
            return _without_text(transformers.AutoModelForImageTextToText.from_config(config))
    except Exception as error:  # noqa: BLE001 - as in `read_config`
        raise StartupError(f"{CONFIG_FILE}: its vision part cannot be built: {_line(error)}") from None


def load_model(model_dir: Path, config: Any, device: torch.device) -> Any:
    """The vision part in fp32 on the device. Raises StartupError."""
    import transformers

    if (model_dir / PROJECTOR_FILE).is_symlink():
        return _load_projector(model_dir / PROJECTOR_FILE, config).to(device)
    with ExitStack() as files:
        open_tensor_files(model_dir, files)  # checks headers, as for the text model
    logging_of_library: Any = transformers.utils.logging
    logging_of_library.set_verbosity_error()
    logging_of_library.disable_progress_bar()
    try:
        whole, info = transformers.AutoModelForImageTextToText.from_pretrained(
            model_dir,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # noqa: BLE001 - as in `read_config`
        raise StartupError(f"transformers cannot load the vision part of {model_dir}: {_line(error)}") from None
    model = _without_text(whole)
    own = {f"model.{name}" for name, _ in model.named_parameters()}
    if missing := sorted(own.intersection(info["missing_keys"])):
        raise StartupError(f"{model_dir}: tensor {missing[0]} is missing")
    for name, stored, expected in info["mismatched_keys"]:
        if name in own:
            raise StartupError(
                f"{model_dir}: tensor {name} has shape {list(stored)}; config.json makes it {list(expected)}"
            )
    return model.eval().requires_grad_(requires_grad=False).to(device)


def _load_projector(path: Path, config: Any) -> Any:
    """The vision part of a GGUF file. Raises StartupError."""
    import transformers

    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    with closing(open_tensors(path)) as file, torch.no_grad():
        names = _projector_names(path.readlink(), file, config)
        model = _without_text(transformers.AutoModelForImageTextToText.from_config(config, **options))
        state = model.state_dict()
        for name, parts in names.items():
            values = _assembled([file.read(file.tensors[own], lambda _: None).float() for own in parts], state[name])
            if is_rotated(parts[0], config.vision_config.model_type):
                heads = config.vision_config.num_attention_heads
                values = values.view(heads, -1, 2, values.shape[-1]).transpose(1, 2)
            if parts[0] == "mm.soft_emb_norm.weight":
                values = values - 1
            state[name].copy_(values.reshape(state[name].shape))
    return model.eval().requires_grad_(requires_grad=False)


def _projector_names(path: Path, file: TensorFile, config: Any) -> dict[str, list[str]]:
    """Parameter or buffer → its tensors. Checked before there is memory for them. Raises StartupError."""
    vision, names = config.vision_config, {}
    down = file.tensors.get("v.blk.0.ffn_down.weight")
    is_swapped = down is not None and down.shape[0] != getattr(vision, "embed_dim", vision.hidden_size)
    for name, values in empty_model(config).state_dict().items():
        own = projector_name(name, config, is_swapped=is_swapped)
        if own.startswith("v.post_ln") and vision.model_type == "clip_vision_model":
            continue  # LLaVA does not use it, and most files lack it
        names[name] = parts = [own]
        if values.dim() == _DIMENSIONS_OF_FRAMES:
            parts.append(f"{own}.1")
        elif ".attn_qkv." in own and own not in file.tensors:
            names[name] = parts = [own.replace("_qkv", f"_{part}") for part in "qkv"]
        for part in parts:
            if (stored := file.tensors.get(part)) is None:
                raise StartupError(f"{path}: tensor {part} is missing")
            shape = _part_shape(part, tuple(values.shape), len(parts), vision)
            if stored.dtype not in FLOAT_DTYPES or _long(stored.shape) != _long(shape):
                expected = f"{list(shape)} in {', '.join(FLOAT_DTYPES)}"
                raise StartupError(f"{path}: tensor {part} is {stored.dtype} {list(stored.shape)}; expected {expected}")
    return names


def _part_shape(own: str, shape: tuple[int, ...], num_parts: int, vision: Any) -> tuple[int, ...]:
    """The shape in the file of each part of a tensor with this shape."""
    if len(shape) == _DIMENSIONS_OF_FRAMES:
        return (*shape[:2], *shape[3:])
    if own == _PATCHES and len(shape) == 2:  # Gemma 4's
        return shape[0], 3, vision.patch_size, vision.patch_size
    return shape if num_parts == 1 else (shape[0] // num_parts, *shape[1:])


def _assembled(parts: list[Tensor], whole: Tensor) -> Tensor:
    if whole.dim() == _DIMENSIONS_OF_FRAMES:
        return torch.stack(parts, dim=2)
    if whole.dim() == 2 and parts[0].dim() == 4:
        return parts[0].permute(0, 2, 3, 1)  # Gemma 4's patches have their colours last
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _long(shape: tuple[int, ...]) -> list[int]:
    """Without dimensions of 1, which files leave out."""
    return [size for size in shape if size != 1]


def _without_text(whole: Any) -> Any:
    model = whole.model
    for name in _TEXT_PARTS:
        if hasattr(model, name):
            setattr(model, name, torch.nn.Identity())
    return model


def _line(error: Exception) -> str:
    return shorten(" ".join(str(error).split()))
