"""An open adapter, checked against the model whose linears it changes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.checkpoint.config.tensors import layer_specs
from penstock.backend.checkpoint.files.json_file import read_json_object, shorten
from penstock.backend.checkpoint.files.layout import CONFIG_FILE as MODEL_CONFIG
from penstock.backend.checkpoint.files.layout import GGUF_SUFFIX, TEXT_PREFIXES
from penstock.backend.checkpoint.formats.tensor_file import FLOAT_DTYPES, StoredTensor, open_file
from penstock.backend.checkpoint.tensor_files.lora_config import CONFIG_FILE, PeftConfig, read_peft_config
from penstock.backend.checkpoint.tensor_files.lora_weights import ADAPTED_FIELDS, LoraWeights
from penstock.backend.checkpoint.tensor_files.safetensors_file import SafetensorsFile
from penstock.backend.errors import StartupError
from penstock.backend.lazy_torch import Tensor, torch

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""The prefix of all names that peft writes."""
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ID_DIGITS = 24
_BLOCK_BYTES = 1 << 20


class PeftAdapter:
    """Close it, or use it in a `with` block. Its matrices are read one layer at a time."""

    def __init__(self, directory: Path, config: DecoderConfig, *, is_turned: bool = False) -> None:
        """Raises StartupError naming the file with the key or the tensor, what is there and what should be."""
        if config.delta_net is not None and not config.delta_net.has_log_decay:
            raise StartupError(f"{directory}: adapters of a GGUF file with delta rules are not supported")
        self.interleaves_rope = config.interleaved_rope and not is_turned
        """Neighbours among the outputs of q and k rotate together, in the adapter as in the base model."""
        self.settings: PeftConfig = read_peft_config(directory)
        self._config = config
        self._path = directory / WEIGHTS_FILE
        if not self._path.is_file() and (directory / "adapter_model.bin").is_file():
            raise StartupError(
                f"{directory} has adapter_model.bin; only {WEIGHTS_FILE} is read: save it again with peft"
            )
        self._file = SafetensorsFile(self._path)
        try:
            self._tensors = {_module_name(name): tensor for name, tensor in self._file.tensors.items()}
            self._check()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def rank(self) -> int:
        """The largest rank of its matrices."""
        return max(tensor.shape[0] for name, tensor in self._tensors.items() if name.endswith(_DOWN))

    @property
    def num_values(self) -> int:
        """Numbers in memory: kernels pad ranks to 4 and outputs to 16 (`native_lora`)."""
        num_values = 0
        for name, tensor in self._tensors.items():
            rows, columns = tensor.shape
            num_values += (rows + -rows % (4 if name.endswith(_DOWN) else 16)) * columns
        return num_values

    @property
    def modules(self) -> list[str]:
        """The last parts of the names of the linears that it changes, such as q_proj."""
        return sorted({name.removesuffix(_DOWN).rpartition(".")[2] for name in self._tensors if name.endswith(_DOWN)})

    def layer(self, index: int) -> dict[str, list[LoraWeights]]:
        """Read a layer: field of `LayerWeights` → additions to its outputs, in order. Fields without an adapter are
        left out."""
        found: dict[str, list[LoraWeights]] = {}
        for field, first_output, module, _ in _linears(self._config, index):
            if module + _DOWN in self._tensors:
                down, up = self._read(module + _DOWN), self._read(module + _UP)
                lora = LoraWeights(first_output, down, up * self.settings.scale_of(module))
                found.setdefault(field, []).append(lora)
        return found

    def _read(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        values = torch.empty(tensor.shape, dtype=torch.float32)
        self._file.copy(tensor, values, lambda _: None)
        return values

    def _check(self) -> None:
        modules = {
            module: shape
            for index in range(self._config.num_layers)
            for _, _, module, shape in _linears(self._config, index)
        }
        for name, tensor in self._tensors.items():
            module = name.removesuffix(_DOWN).removesuffix(_UP)
            if module == name or module not in modules:
                raise StartupError(f"{self._path}: tensor {shorten(name)} {self._why_not(name)}")
            for other in (_DOWN, _UP):
                if module + other not in self._tensors:
                    raise StartupError(f"{self._path}: tensor {module}{other} is missing; {shorten(name)} needs it")
            rank, (outputs, inputs) = self.settings.rank_of(module), modules[module]
            expected = (rank, inputs) if name.endswith(_DOWN) else (outputs, rank)
            self._check_tensor(name, tensor, expected)
        if not self._tensors:
            raise StartupError(f"{self._path} has no tensors")

    def _check_tensor(self, name: str, tensor: StoredTensor, expected: tuple[int, int]) -> None:
        if tensor.shape != expected:
            raise StartupError(
                f"{self._path}: tensor {name} has shape {list(tensor.shape)}; with this base model and the rank in "
                f"{CONFIG_FILE} it is {list(expected)}: use the adapter with the model that it was trained on"
            )
        if tensor.dtype not in FLOAT_DTYPES:
            raise StartupError(f"{self._path}: tensor {name} is {tensor.dtype}; {', '.join(FLOAT_DTYPES)} are read")

    def _why_not(self, name: str) -> str:
        if "lora_magnitude_vector" in name:
            return "belongs to DoRA, which is not supported"
        if "lora_embedding_" in name or "embed_tokens" in name:
            return "changes the embeddings, which is not supported"
        if name.startswith("lm_head."):
            return "changes the output layer, which is not supported"
        if ".experts." in name or name.endswith((".router" + _DOWN, ".gate" + _DOWN, ".router" + _UP, ".gate" + _UP)):
            return "changes experts or their router, which is not supported; adapters of attention are"
        if not name.endswith((_DOWN, _UP)):
            return f"is neither a {_DOWN[1:]} nor a {_UP[1:]}, and nothing else is supported"
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) >= self._config.num_layers:
            return f"is for layer {layer[1]}; the base model has {self._config.num_layers}"
        return "is for a linear that the base model does not have"


@contextmanager
def open_adapters(
    model_dir: Path, directories: Sequence[Path], config: DecoderConfig
) -> Generator[list[PeftAdapter], None, None]:
    """The adapters of a model, closed at the end of the block. Raises StartupError."""
    is_turned = turns_heads(model_dir)
    with ExitStack() as closers:
        yield [closers.enter_context(PeftAdapter(directory, config, is_turned=is_turned)) for directory in directories]


def turns_heads(model_dir: Path) -> bool:
    """Whether a GGUF file stores q and k so that neighbours rotate, unlike the checkpoint that adapters fit."""
    is_gguf = any(path.suffix == GGUF_SUFFIX for path in model_dir.iterdir())
    return is_gguf and read_json_object(model_dir / MODEL_CONFIG).get("rope_interleave") is True


def _linears(config: DecoderConfig, index: int) -> Iterator[tuple[str, int, str, tuple[int, ...]]]:
    """The field, its first output, name and shape of each linear of a layer that may have an adapter."""
    layout = layer_specs(config, index)
    for field in ADAPTED_FIELDS:
        first_output = 0
        for spec in layout.get(field, ()):
            yield field, first_output, spec.name.removesuffix(".weight"), spec.shape
            first_output += spec.shape[0]


def _module_name(stored: str) -> str:
    """The name that the tensor's module has in the text model's checkpoint, with the adapter's suffix."""
    name = stored.removeprefix(_PREFIX)
    prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), "")
    return TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def adapter_id(directory: Path) -> str:
    """A hash of the adapter's files: other adapters have other ids, wherever they are stored. Raises StartupError."""
    hashes = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with open_file(directory / name) as file:
            hashes.append(_digest(file))
    return hashlib.sha256(b"".join(hashes)).hexdigest()[:_ID_DIGITS]


def _digest(file: BinaryIO) -> bytes:
    digest = hashlib.sha256()
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
    return digest.digest()
