"""GGUF files with a head that predicts the token after the next one (MTP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.gguf import cached_directories
from penstock.backend.checkpoint.hub import resolve_model
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype
from tests.backend.checkpoint.gguf.converted_tensors import converted
from tests.backend.checkpoint.gguf.test_gguf_models import all_of, last_logits
from tests.backend.checkpoint.gguf.writer import add_mtp_layer, byte_level_vocabulary, from_model
from tests.backend.passes.decoder.quantized_oracle import relative_error
from tests.checkpoints import load_oracle, make_checkpoint
from tests.mtp import add_head

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_head_of_a_file_is_that_of_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that lacks a part of it, or whose head has an embedding or output layer of its own, has none."""
    monkeypatch.setattr(cached_directories, "cache_directory", lambda: tmp_path / "cache")
    checkpoint = add_head(make_checkpoint("qwen3.5", tmp_path / "checkpoint", vocab_size=320))
    model, tensors = load_oracle(checkpoint), load_file(checkpoint / "model.safetensors")
    own = converted("qwen35", {name: w for name, w in tensors.items() if not name.startswith("mtp.")}, model.config)
    file = from_model("qwen35", model, all_of("F32"), byte_level_vocabulary(320), own)
    add_mtp_layer(file, 3, tensors)
    model_dir = resolve_model(str(file.write(tmp_path / "model.gguf")))
    layers = []
    for directory in (model_dir, checkpoint):
        config = read_decoder_config(directory, with_mtp=True)
        assert config.has_mtp
        with open_weights(directory, config) as weights:
            layers.append(weights.layer(3, Dtype.FP32))
    for name in ("mtp_fc", "qkv", "o", "gate_up", "down"):
        assert torch.equal(getattr(layers[0], name), getattr(layers[1], name)), name
    for name in ("mtp_embedding_norm", "mtp_hidden_norm", "mtp_norm", "attention_norm", "mlp_norm", "q_norm"):
        assert torch.allclose(getattr(layers[0], name), getattr(layers[1], name) + 1), name
    prompt = np.random.default_rng(0).integers(0, 256, 30).tolist()
    assert relative_error(last_logits(model_dir, prompt), last_logits(checkpoint, prompt)) < 1e-4
    for index, own in enumerate(("embed_tokens", "shared_head_head")):
        file.tensors[f"blk.3.nextn.{own}.weight"] = file.tensors["token_embd.weight"]
        directory = resolve_model(str(file.write(tmp_path / f"{index}.gguf")))
        assert not read_decoder_config(directory, with_mtp=True).has_mtp
        del file.tensors[f"blk.3.nextn.{own}.weight"]
    del file.tensors["blk.3.nextn.hnorm.weight"]
    assert not read_decoder_config(resolve_model(str(file.write(tmp_path / "third.gguf"))), with_mtp=True).has_mtp
