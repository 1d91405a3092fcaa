"""The tensors of a checkpoint by their headers: of a directory or GGUF file, or of a hub model without
downloading it."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from penstock.backend.checkpoint.files.layout import GGUF_SUFFIX, SINGLE_FILE, weight_files
from penstock.backend.checkpoint.gguf.header import read_header
from penstock.backend.checkpoint.tensor_files.safetensors_file import SafetensorsFile
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path


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
