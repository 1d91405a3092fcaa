"""Checkpoints whose code is on the hub only: the layouts that it writes, against its formula."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import gelu, layer_norm, linear

from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.encoder.forward_pass import EncoderPass
from tests.backend.passes.encoder.driver import cosine, random_rows, run_rows
from tests.encoder_checkpoints import COMMON, make_encoder

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

_THETA, _FACTOR, _HEADS = 500.0, 8.0, 4
_NEW = {
    **{key: COMMON[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
    "num_attention_heads": _HEADS,
    "max_position_embeddings": 160,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "position_embedding_type": "rope",
    "rope_theta": _THETA,
    "rope_scaling": {"type": "ntk", "factor": _FACTOR},
    "pack_qkv": True,
}


class NewFormula:
    """NewForMaskedLM in float64: post-norm, packed q, k and v, up before gate, and NTK scaling for all positions."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def states(self, row: NDArray[np.int32]) -> Tensor:
        embeddings = self._tensors["new.embeddings.word_embeddings.weight"][torch.from_numpy(row).long()]
        embeddings = embeddings + self._tensors["new.embeddings.token_type_embeddings.weight"][0]
        x = self._norm("new.embeddings.LayerNorm", embeddings)
        for layer in range(int(COMMON["num_hidden_layers"])):
            name = f"new.encoder.layer.{layer}."
            x = self._norm(f"{name}attn_ln", x + self._attention(f"{name}attention.", x))
            up, gate = linear(x, self._tensors[f"{name}mlp.up_gate_proj.weight"]).chunk(2, -1)
            x = self._norm(f"{name}mlp_ln", x + self._linear(f"{name}mlp.down_proj", gelu(gate) * up))
        return x

    def sparse(self, row: NDArray[np.int32]) -> Tensor:
        x = self._norm("lm_head.norm", gelu(self._linear("lm_head.dense", self.states(row))))
        logits = linear(
            x, self._tensors["new.embeddings.word_embeddings.weight"], self._tensors["lm_head.decoder.bias"]
        )
        return torch.log1p(torch.relu(logits)).amax(0)

    def _attention(self, name: str, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (_HEADS, -1)) for part in self._linear(f"{name}qkv_proj", x).chunk(3, -1))
        q, k = self._rotate(q), self._rotate(k)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        return self._linear(f"{name}o_proj", torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))

    def _rotate(self, x: Tensor) -> Tensor:
        dim = x.shape[-1]
        frequencies = (_THETA * _FACTOR) ** (-torch.arange(0, dim, 2).double() / dim) / _FACTOR ** (2 / dim)
        angles = (torch.arange(len(x)).double()[:, None] * frequencies).repeat(1, 2)[:, None]
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]
        return layer_norm(x, (x.shape[-1],), weight, bias, 1e-12)


def test_new_model_follows_the_formula_of_its_code(tmp_path: Path) -> None:
    make_encoder("gte", "ForMaskedLM", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("gte.", "new."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    (tmp_path / "config.json").write_text(json.dumps(_NEW | {"architectures": ["NewForMaskedLM"]}))
    forward_pass, formula = EncoderPass.load(tmp_path, PassOptions(dtype="fp32")), NewFormula(tensors)
    rows = random_rows((1, 17, 150))
    for row, sparse, states in zip(
        rows, run_rows(forward_pass, rows, "sparse"), run_rows(forward_pass, rows, "token_embed"), strict=True
    ):
        assert cosine(formula.states(row), states) == pytest.approx(1.0, abs=1e-6)
        np.testing.assert_allclose(sparse, formula.sparse(row), rtol=1e-4, atol=1e-5)
    forward_pass.close()


@torch.no_grad()
def test_nomics_own_head_of_words_has_no_biases(tmp_path: Path) -> None:
    model = make_encoder("nomic", "ForMaskedLM", tmp_path)
    head = model.cls.predictions
    for bias in (head.bias, head.decoder.bias, head.transform.dense.bias):
        bias.zero_()
    file = tmp_path / "model.safetensors"
    absent = ("cls.predictions.bias", "cls.predictions.transform.dense.bias")
    save_file({name: tensor for name, tensor in load_file(file).items() if name not in absent}, file)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mlp_fc1_bias": False}))
    forward_pass = EncoderPass.load(tmp_path, PassOptions(dtype="fp32"))
    rows = random_rows((1, 17, 150))
    for row, result in zip(rows, run_rows(forward_pass, rows, "sparse"), strict=True):
        logits = model(torch.from_numpy(row.astype(np.int64))[None]).logits[0]
        np.testing.assert_allclose(result, torch.log1p(torch.relu(logits)).amax(0).numpy(), rtol=1e-4, atol=1e-5)
    forward_pass.close()
