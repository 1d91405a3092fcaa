"""Settings of kernels and steps that were measured for a GPU model; constants for all others.

A file in DIRECTORY has a model's, chosen by a person with `penstock gpu-check --choices` (docs/gpu/README.md). A start
reads it once, so the settings stay the same while the process runs.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from penstock.backend.errors import StartupError

DIRECTORY = Path(__file__).parents[1] / "choices"
DRIVERS_CHOICE = -1
"""Replaces a percentage of shared memory: the driver chooses by a block's need."""
SMALL_HIDDEN_SIZE = 2048
"""Models with narrower hidden states are small: a layer's launches take as long as reading its weights."""
_MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class KernelChoices:
    page_size_tokens: int = 32
    """Default of --page-size."""
    step_tokens: int = 2048
    """Default of --max-batch-tokens."""
    ring_tiles: int = 8
    """Most tiles of keys and values that a warp of decode attention keeps in shared memory."""
    carveout_percent: int = 100
    """The share of a multiprocessor's memory that is shared memory, not L1, while decode attention runs."""
    chunk_tokens: int = 256
    """Shortest chunk of a row's context in decode attention."""
    chunk_levels: int = 0
    """1: chunks of decode attention are longer in steps of many tokens and shorter in those of few, so a row's bits
    depend on its batch; 0: always the same."""
    query_rows: int = 128
    """Query rows of a block of prefill attention, for heads of at most 128 values."""
    key_tokens: int = 64
    """Keys of a tile of prefill attention, for such heads."""
    wgmma: int = 1
    """1: prefill attention multiplies with warpgroups where such a kernel exists, with its own tiles; 0: never."""
    mixed_tokens: int = 2048
    """Most tokens of prompts, in addition to decodes, in a captured step; with 0 only decode steps are captured."""
    product_rows: int = 4
    """Most rows of a decode step whose products are fused kernels of ours, in unquantised models."""
    small_product_rows: int = 32
    """The same for models with hidden states narrower than SMALL_HIDDEN_SIZE."""
    quantised_rows: int = 64
    """Most rows for which a kernel of ours multiplies with quantised weights; more rows widen the weights first. Below
    64 a captured mixed step may have other bits than the same step alone."""
    rounded_rows: int = 257
    """Fewest rows that get 8 bits, where a checkpoint or --quantize fp8 asks for it. 257 is more than a captured step
    has: not measured is whether a library allocates memory for such products while a step is captured."""
    grouped_rows: int = 0
    """Fewest rows whose bf16 experts are grouped products of torch; 0: none. More than a captured decode step has: the
    library allocates memory."""
    claimed_products: int = 0
    """1: in steps of up to four rows blocks claim tiles of gate and up, and of logits; 0: a block for each. The same
    bits."""
    whole_products: int = 0
    """1: with --deterministic a product has all rows at once, where the GPU was found to give each row the bits that it
    has alone; 0: blocks of rows."""

    @property
    def uses_wgmma(self) -> bool:
        """Other tiles than the constants are those of mma.sync."""
        tile, constant_tile = ((choices.query_rows, choices.key_tokens) for choices in (self, CONSTANTS))
        return bool(self.wgmma) and tile == constant_tile

    def product_rows_of(self, hidden_size: int) -> int:
        return self.small_product_rows if hidden_size < SMALL_HIDDEN_SIZE else self.product_rows

    def numerics(self) -> dict[str, str]:
        """The choices that change bits, by name, if one of them differs from the constant: sums have another
        order then."""
        ours, constants = (
            {
                "chunk tokens": choices.chunk_tokens,
                "chunk levels": choices.chunk_levels,
                "key tokens": choices.key_tokens,
                "wgmma": int(choices.uses_wgmma),
                "product rows": choices.product_rows,
                "small product rows": choices.small_product_rows,
                "quantised rows": choices.quantised_rows,
                "rounded rows": choices.rounded_rows,
                "grouped rows": choices.grouped_rows,
                "whole products": choices.whole_products,
            }
            for choices in (self, CONSTANTS)
        )
        return {} if ours == constants else {name: str(value) for name, value in ours.items()}

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"wgmma": int(self.uses_wgmma)}
        return ", ".join(f"{name} {value}" for name, value in values.items())

    def of_kernels(self) -> str:
        """The kernels' choices in words, without the defaults of options, which may be overruled."""
        return str(self).partition(", ")[2].partition(", ")[2]


CONSTANTS = KernelChoices()
_PRODUCT_ROWS = (0, 1, 2, 4, 8, 16, 32)
ALLOWED: dict[str, tuple[int, ...]] = {
    "page_size_tokens": (16, 32, 64),
    "step_tokens": (512, 1024, 2048, 4096, 8192),
    "ring_tiles": (3, 4, 5, 6, 7, 8),
    "carveout_percent": (DRIVERS_CHOICE, 50, 75, 100),
    "chunk_tokens": (128, 256, 512),
    "chunk_levels": (0, 1),
    "query_rows": (64, 128),
    "key_tokens": (32, 64),
    "wgmma": (0, 1),
    "mixed_tokens": (0, 64, 128, 256, 512, 1024, 2048),
    "product_rows": _PRODUCT_ROWS,
    "small_product_rows": _PRODUCT_ROWS,
    "quantised_rows": (16, 24, 32, 40, 48, 64),
    "rounded_rows": (17, 33, 65, 129, 257),
    "grouped_rows": (0, 257, 513, 1025, 2049),
    "claimed_products": (0, 1),
    "whole_products": (0, 1),
}


class ChoicesRefused(Exception):
    """The file cannot be read, or a setting is unknown or out of bounds; the message says which."""


def read_choices(path: Path) -> KernelChoices:
    """Read the settings; those that the file omits are the constants. Raises ChoicesRefused."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise ChoicesRefused(f"{path} has more than {_MAX_FILE_BYTES:,} bytes")
        settings = tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        raise ChoicesRefused(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # neither UTF-8 nor TOML
        raise ChoicesRefused(f"{path} is not a TOML file: {error}") from error
    for name, value in settings.items():
        if name not in ALLOWED:
            raise ChoicesRefused(f"{path} has the unknown setting {name}; known are {', '.join(ALLOWED)}")
        if type(value) is not int or value not in ALLOWED[name]:
            allowed = ", ".join(map(str, ALLOWED[name]))
            raise ChoicesRefused(f"{path}: {name} is {value!r}; it must be one of {allowed}")
    return KernelChoices(**settings)


def file_of(gpu: str, directory: Path = DIRECTORY) -> Path:
    """The file of a GPU model, by the driver's name for it."""
    return directory / f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.toml"


def find_choices(gpu: str, capability: tuple[int, int], directory: Path = DIRECTORY) -> tuple[KernelChoices, str]:
    """The adopted settings of the GPU model, or of its architecture, else the constants; and their origin in words.

    Raises ChoicesRefused.
    """
    architecture = f"sm_{capability[0]}{capability[1]}"
    for path in (file_of(gpu, directory), directory / f"{architecture}.toml"):
        if path.exists():
            return read_choices(path), f"adopted for {path.stem}"
    return CONSTANTS, f"not measured on {gpu}"


@cache
def adopted_choices(device: str) -> tuple[KernelChoices, str]:
    """The adopted settings for `PassOptions.device`.

    The CPU has the constants, and so has a missing GPU, for which a dry run plans. Raises StartupError.
    """
    if device == "cpu" or not any(DIRECTORY.glob("*.toml")):
        return CONSTANTS, "not measured"
    import torch  # slow to import, and not needed while nothing was adopted

    index = int(device.partition(":")[2])
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return CONSTANTS, "the GPU is not there"
    properties = torch.cuda.get_device_properties(index)
    try:
        return find_choices(properties.name, (properties.major, properties.minor), DIRECTORY)
    except ChoicesRefused as refusal:
        raise StartupError(f"{refusal}; remove the file, or correct it") from refusal
