"""Opens the safetensors files of a checkpoint, and fits the tensors of a decoder to its names and its vocabulary."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, closing
from pathlib import Path

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.checkpoint.config.tensors import EMBEDDING, INPUT_TABLE, LM_HEAD
from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.files.layout import INDEX_FILE, SINGLE_FILE, read_index, rename_all, weight_files
from penstock.backend.checkpoint.files.tokenizer_file import count_token_ids
from penstock.backend.checkpoint.formats.tensor_file import FLOAT_DTYPES, StoredTensor, TensorFile
from penstock.backend.checkpoint.tensor_files.safetensors_file import SafetensorsFile
from penstock.backend.errors import StartupError

logger = logging.getLogger("penstock.backend")

_MODEL_PREFIX = "model."
_STACKED_LINEARS = ("gate_proj", "up_proj", "down_proj")
_STACKED = re.compile(
    rf"((?:model|mtp)\.layers\.\d{{1,6}}\.)\w+\.(?:switch_mlp|experts)\.({'|'.join(_STACKED_LINEARS)})\.(\w+)", re.ASCII
)
_STACKED_PAIRS = re.compile(r"((?:model|mtp)\.layers\.\d{1,6}\.mlp\.experts\.)(gate_up|down)_proj", re.ASCII)
"""Qwen3.5's experts: one tensor [experts, outputs, inputs], in which the rows of gate come before those of up."""
_HEADS = ("lm_head.", "score.", "v_head.")
"""Prefixes of tensors outside the model, which have no _MODEL_PREFIX."""


def open_safetensors(model_dir: Path, closers: ExitStack) -> tuple[dict[str, TensorFile], str]:
    """Tensor name → its file, closed by closers; and a description of the files for messages. Raises StartupError."""
    names, index = weight_files(model_dir), model_dir / INDEX_FILE
    if not names:
        raise StartupError(f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE}: {_found_instead(model_dir)}")
    shards = {name: closers.enter_context(closing(SafetensorsFile(model_dir / name))) for name in names}
    if names == (SINGLE_FILE,) or not index.exists():
        where = str(model_dir / names[0]) if len(names) == 1 else f"the {len(names)} shards in {model_dir}"
        return _by_tensor(shards.values()), where
    weight_map = read_index(index)
    for tensor, name in weight_map.items():
        if tensor not in shards[name].tensors:
            raise StartupError(f"tensor {tensor} is missing from {model_dir / name}, where {INDEX_FILE} says it is")
    return {tensor: shards[name] for tensor, name in weight_map.items()}, f"the files of {index}"


def _by_tensor(files: Iterable[TensorFile]) -> dict[str, TensorFile]:
    found: dict[str, TensorFile] = {}
    for file in files:
        for name in file.tensors:
            if name in found:
                raise StartupError(f"{file.path}: tensor {shorten(name)} is in {found[name].path.name} as well")
            found[name] = file
    return found


def fit_to_decoder(files: dict[str, TensorFile], vocab_size: int) -> dict[str, TensorFile]:
    """Give tensors the names that `TensorSpec` has, and the vocabulary at most vocab_size rows."""
    if EMBEDDING not in files and EMBEDDING.removeprefix(_MODEL_PREFIX) in files:
        files = rename_tensors(files, lambda name: name if name.startswith(_HEADS) else _MODEL_PREFIX + name)
    crop_rows(files, (EMBEDDING, LM_HEAD, INPUT_TABLE), vocab_size)
    return files


def split_experts(files: dict[str, TensorFile], config: DecoderConfig) -> dict[str, TensorFile]:
    """Give each expert its own tensors where all of a layer are in one, as MLX and Qwen3.5 store them. Raises
    StartupError."""
    experts, names = config.experts, config.names
    if experts is None or experts.beside_mlp:
        return files
    sizes = {"gate_up": (2 * experts.width, config.hidden_size), "down": (config.hidden_size, experts.width)}
    own = dict(zip(_STACKED_LINEARS, (*names.expert_gate_up, names.expert_down), strict=True))

    def parts(name: str, tensor: StoredTensor) -> dict[str, StoredTensor]:
        pair = _STACKED_PAIRS.fullmatch(name) if names.fused_experts is None else None
        if pair is not None and tensor.shape == (experts.count, *sizes[pair[2]]):
            linears = ("gate_proj", "up_proj") if pair[2] == "gate_up" else ("down_proj",)
            rows = tensor.shape[1] // len(linears)
            return {
                f"{pair[1]}{i}.{linear}.weight": tensor.item(i).rows(place * rows, rows)
                for i in range(experts.count)
                for place, linear in enumerate(linears)
            }
        match = _STACKED.fullmatch(name)
        if match is None or tensor.shape[:1] != (experts.count,):
            return {name: tensor}
        layer, linear, part = match.groups()
        return {f"{layer}{names.expert.format(i)}.{own[linear]}.{part}": tensor.item(i) for i in range(experts.count)}

    found: dict[str, TensorFile] = {}
    for name, file in files.items():
        for part in parts(name, file.tensors[name]):
            if part in found:
                raise StartupError(f"{file.path}: tensor {shorten(name)} is another {shorten(part)}")
            found[part] = file
    for file in dict.fromkeys(files.values()):
        file.tensors = {
            part: item for name, tensor in file.tensors.items() for part, item in parts(name, tensor).items()
        }
    return found


def crop_rows(files: dict[str, TensorFile], names: Iterable[str], num_rows: int) -> None:
    """Hide the rows after the first num_rows of these tensors."""
    for name in names:
        stored = files[name].tensors[name] if name in files else None
        if stored is not None and stored.dtype in FLOAT_DTYPES and stored.shape and stored.shape[0] > num_rows:
            logger.info("Only the first %d rows of the %d of %s are used", num_rows, stored.shape[0], name)
            files[name].tensors[name] = stored.rows(0, num_rows)


def rename_tensors(files: dict[str, TensorFile], rename: Callable[[str], str]) -> dict[str, TensorFile]:
    """Rename the tensors of all files. Raises StartupError if two get the same name."""
    for file in dict.fromkeys(files.values()):
        file.tensors = rename_all(file.tensors, rename, file.path)
    return rename_all(files, rename, "the checkpoint")


def _found_instead(model_dir: Path) -> str:
    """Describe the weights of a directory without safetensors, and say what to do."""
    others = sorted(path.name for path in model_dir.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if others:
        return f"it has {others[0]}, and only safetensors are loaded; convert it with save_pretrained of transformers"
    if any(model_dir.glob("consolidated*.safetensors")):
        return "it has consolidated.safetensors, Mistral's own layout; download the files with Hugging Face's names"
    return "it has no weights; download the model's *.safetensors files into it"


_NAMES = (EMBEDDING, EMBEDDING.removeprefix("model."))


def fit_vocab_size(model_dir: Path, vocab_size: int, names: Collection[str] = _NAMES) -> int:
    """config.json's vocab_size, corrected by the rows of the embedding, which has one of these names.

    Fewer rows are all that there are. Of more rows only those count that the tokenizer has tokens for: the others are
    padding, which must not be sampled. Reads one header; without weights the size stays.
    """
    rows = count_rows(model_dir, names)
    if rows is None or rows == vocab_size:
        return vocab_size
    if rows < vocab_size:
        return max(rows, 1)
    counts = count_token_ids(model_dir)
    return max(vocab_size, min(rows, 0 if counts is None else counts.with_added))


def stored_names(model_dir: Path) -> Collection[str] | None:
    """The names of the tensors in safetensors; None if there are no weights in such files. Raises StartupError."""
    names, index = weight_files(model_dir), model_dir / INDEX_FILE
    paths = [path for name in names if (path := model_dir / name).exists()]
    if paths and len(names) > 1 and index.exists():
        return read_index(index).keys()
    found = set[str]()
    for path in paths:
        with closing(SafetensorsFile(path)) as file:
            found |= file.tensors.keys()
    return found if paths else None


def count_rows(model_dir: Path, tensors: Collection[str]) -> int | None:
    """The rows of the first of these tensors that a checkpoint in safetensors has. Raises StartupError."""
    names = weight_files(model_dir)
    index = model_dir / INDEX_FILE
    if len(names) > 1 and index.exists():
        weight_map = read_index(index)
        names = tuple(weight_map[name] for name in tensors if name in weight_map)
    for path in (model_dir / name for name in names if (model_dir / name).exists()):
        with closing(SafetensorsFile(path)) as file:
            found = next((file.tensors[name] for name in tensors if name in file.tensors), None)
        if found is not None and len(found.shape) == 2:
            return found.shape[0]
    return None
