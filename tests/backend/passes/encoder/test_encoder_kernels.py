"""The native kernels of encoders on each path against plain torch, and a row's bits in any batch and on any threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.backend.checkpoint.encoders.read_config import read_encoder
from penstock.backend.checkpoint.encoders.weights import open_encoder
from penstock.backend.dtypes import Dtype
from penstock.backend.passes.encoder.forward_pass import EncoderPass
from penstock.backend.passes.encoder.model import EncoderModel
from penstock.backend.passes.encoder.native_ops import NativeEncoderOps
from penstock.backend.passes.encoder.spec import make_spec
from penstock.backend.passes.encoder.torch_ops import TorchEncoderOps
from tests.backend.passes.cpu.path_libraries import open_emulated_tiles, open_path
from tests.backend.passes.encoder.driver import cosine, random_rows, run_rows
from tests.encoder_checkpoints import make_encoder

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backend.passes.encoder.ops import EncoderOps

TILES = "tiles"
PATHS = ("avx512_bf16", "avx2", TILES)


def load_pass(model_dir: Path, path: str, dtype: torch.dtype, num_threads: int = 3) -> EncoderPass:
    """Load the pass, with torch's operations if path is empty."""
    config = read_encoder(model_dir)
    ops: EncoderOps = TorchEncoderOps(config, dtype)
    if path:
        library = open_emulated_tiles() if path == TILES else open_path(path)
        ops = NativeEncoderOps(library, config, Dtype.of(dtype), num_threads, 50e-6, uses_tiles=path == TILES)
    with open_encoder(model_dir, config) as weights, torch.inference_mode():
        model = EncoderModel(config, ops, weights, dtype, int8=False)
    return EncoderPass(config, ops, model, make_spec(config, dtype, "none"))


@pytest.mark.parametrize("preset", ["bert", "mpnet", "modernbert", "nomic"])
@pytest.mark.parametrize("path", PATHS)
def test_a_path_computes_what_torch_computes(path: str, preset: str, tmp_path: Path) -> None:
    make_encoder(preset, "ForSequenceClassification", tmp_path)
    rows = random_rows((1, 16, 33, 150))
    for dtype, limit in ((torch.float32, 0.99999), (torch.bfloat16, 0.999)):
        reference, native = load_pass(tmp_path, "", torch.float32), load_pass(tmp_path, path, dtype)
        wanted, found = (run_rows(each, rows, "token_embed") for each in (reference, native))
        assert min(cosine(a, b) for a, b in zip(wanted, found, strict=True)) > limit
        native.close()


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [("bert", torch.float32), ("bert", torch.bfloat16), ("mpnet", torch.float32), ("modernbert", torch.bfloat16)],
)
@pytest.mark.parametrize("path", PATHS)
def test_bits_depend_on_neither_batch_nor_threads(path: str, preset: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_encoder(preset, "Model", tmp_path, max_position_embeddings=400)
    rows = random_rows((1, 7, 390, 16, 33, 150, 2, 64))
    many, one = load_pass(tmp_path, path, dtype, num_threads=4), load_pass(tmp_path, path, dtype, num_threads=1)
    together = run_rows(many, rows, "token_embed")
    for row, result in zip(rows, together, strict=True):
        for each in (many, one):
            np.testing.assert_array_equal(run_rows(each, [row], "token_embed")[0], result)
    many.close()
    one.close()


def test_a_nan_stays_in_its_row(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_encoder("bert", "Model", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][95] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    forward_pass = load_pass(tmp_path, PATHS[0], torch.bfloat16)
    rows = random_rows((5, 40, 9), below=95)
    clean = run_rows(forward_pass, rows, "token_embed")
    rows[1][7] = 95
    poisoned = run_rows(forward_pass, rows, "token_embed")
    assert np.isnan(poisoned[1]).all()
    for place in (0, 2):
        np.testing.assert_array_equal(poisoned[place], clean[place])
    forward_pass.close()


def test_embedding_rows_are_grouped_in_the_order_of_the_batch(tmp_path: Path) -> None:
    make_encoder("distilbert", "Model", tmp_path)
    forward_pass = load_pass(tmp_path, PATHS[0], torch.float32)
    rows = random_rows([90] * 25)  # more tokens than are computed together
    results = run_rows(forward_pass, rows, "embed")
    assert len({result.tobytes() for result in results}) == len(rows)
    np.testing.assert_array_equal(results[-1], run_rows(forward_pass, rows[-1:], "embed")[0])
    forward_pass.close()


@pytest.mark.parametrize("preset", ["bert", "mpnet", "modernbert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_step_in_parts_have_the_bits_of_one_alone(preset: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_encoder(preset, "Model", tmp_path)
    forward_pass = load_pass(tmp_path, PATHS[0], dtype, num_threads=2)
    rows = random_rows([*[40] * 12, 150, 1, 7, *[90] * 5])  # parts of 40 + 40 + 40, …, 150, 1 + 7 + 90, 90, …
    together = run_rows(forward_pass, rows, "token_embed")
    for row, result in zip(rows, together, strict=True):
        np.testing.assert_array_equal(run_rows(forward_pass, [row], "token_embed")[0], result)
    forward_pass.close()
