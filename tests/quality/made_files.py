"""GGUF files of the real model in other types than the published one. They have the same bytes on every machine."""

from __future__ import annotations

import hashlib
import re
import struct
from contextlib import ExitStack
from typing import TYPE_CHECKING

import gguf
import numpy as np

from tests.quality.block_recipes import quantize

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
K_MIXTURE = "K"
"""The file whose down matrices have K_TYPES in turn. The others are Q8_0, as llama.cpp has them in its Q6_K: their 576
inputs are no multiple of 256."""
_ALIGNMENT = 32


def make_files(source: Path, type_names: Sequence[str], directory: Path) -> dict[str, str]:
    """Write all matrices of the source in each type, to TYPE.gguf; return the SHA-256 of each file."""
    reader = gguf.GGUFReader(source)
    digests = {name: hashlib.sha256() for name in type_names}
    with ExitStack() as stack:
        files = {name: stack.enter_context((directory / f"{name}.gguf").open("wb")) for name in type_names}

        def write(name: str, content: bytes) -> None:
            content += bytes(-len(content) % _ALIGNMENT)
            files[name].write(content)
            digests[name].update(content)

        for name in type_names:
            write(name, _header(reader, name))
        for tensor in reader.tensors:  # the outer loop: each is dequantised once
            numbers: NDArray[np.float32] = gguf.dequantize(tensor.data, tensor.tensor_type)
            for name in type_names:
                kind = _type_of(tensor, name)
                write(name, (quantize(numbers, kind) if numbers.ndim > 1 else numbers).tobytes())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def _header(reader: gguf.GGUFReader, type_name: str) -> bytes:
    """The source's metadata, with entries for tensors of these types."""
    parts, offset = [bytes(reader.data[: reader.tensors[0].field.offset])], 0
    for tensor in reader.tensors:
        kind = gguf.GGMLQuantizationType[_type_of(tensor, type_name)]
        values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        name, shape = tensor.name.encode(), [int(size) for size in tensor.shape]
        parts.append(struct.pack(f"<Q{len(name)}sI{len(shape)}QIQ", len(name), name, len(shape), *shape, kind, offset))
        size = tensor.n_elements // values * num_bytes
        offset += size + -size % _ALIGNMENT
    return b"".join(parts)


def _type_of(tensor: gguf.ReaderTensor, type_name: str) -> str:
    if len(tensor.shape) == 1:
        return "F32"
    if type_name != K_MIXTURE:
        return type_name
    down = re.fullmatch(r"blk\.(\d+)\.ffn_down\.weight", tensor.name)
    return K_TYPES[int(down[1]) % len(K_TYPES)] if down else "Q8_0"
