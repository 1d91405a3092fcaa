"""Models in other layouts, presented as checkpoint directories."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.files.generation_config import read_generation_defaults
from penstock.backend.checkpoint.gguf import cached_directories
from penstock.backend.checkpoint.hub import resolve_config, resolve_model
from penstock.backend.checkpoint.other_layouts import directory
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.errors import StartupError
from tests.backend.checkpoint.gguf.test_gguf_models import last_logits
from tests.backend.checkpoint.other_layouts.test_make_tokenizer import LLAMA, sentencepiece_model, tekken
from tests.backend.checkpoint.test_hub import FakeHub
from tests.backend.passes.decoder.quantized_oracle import relative_error
from tests.checkpoints import load_oracle, make_checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cached_directories, "cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "layouts"


def test_tokenizer_is_made_once_beside_links_to_the_files(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = make_checkpoint("llama2", tmp_path / "my model")
    (model_dir / "tokenizer.model").write_bytes(sentencepiece_model(**LLAMA))
    made = resolve_config(str(model_dir))
    assert made.parent == cache
    assert Tokenizer.from_file(str(made / "tokenizer.json")).token_to_id("</s>") == 2
    assert json.loads((made / "tokenizer_config.json").read_text())["eos_token"] == "</s>"
    open_weights(made, read_decoder_config(made)).close()

    with monkeypatch.context() as without_child:
        without_child.setattr(directory, "_make_tokenizer", None)
        (model_dir / "generation_config.json").unlink()
        (model_dir / "chat_template.jinja").write_text("{{ messages }}")
        os.utime(model_dir / "config.json")
        with pytest.raises(TypeError):  # the template may be in place of one that is made: it counts as input
            resolve_model(str(model_dir))
        (model_dir / "chat_template.jinja").unlink()
        (model_dir / "notes").touch()
        assert resolve_model(str(model_dir)) == made
    assert (made / "notes").exists()
    assert not (made / "generation_config.json").is_symlink()

    (model_dir / "tokenizer.json").write_text("{}")
    assert resolve_model(str(model_dir)) == model_dir


def test_failed_conversion_is_a_line_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path / "model")
    (model_dir / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(StartupError, match=r"^\S+/tokenizer\.model: it cannot be used \(DecodeError: .*\)$"):
        resolve_model(str(model_dir))
    assert list(cache.iterdir()) == []


def to_mistral(model_dir: Path, *, keeps_config: bool = False, **params: Any) -> Path:
    """Rewrite a checkpoint of Hugging Face's layout in Mistral's."""
    config = json.loads((model_dir / "config.json").read_text())
    names = {name: key for key, name in NAMES.items()}
    tensors = {}
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        start, _, rest = name.removeprefix("model.").partition("layers.")
        number, _, part = rest.partition(".")
        if part in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
            halves = tensor.unflatten(0, (-1, 2, config["head_dim"] // 2))
            tensor = halves.transpose(1, 2).flatten(0, 2)
        tensors[f"layers.{number}.{names[part]}" if part else names[start]] = tensor.contiguous()
    save_file(tensors | {"vision_encoder.x": torch.zeros(1)}, model_dir / "consolidated.safetensors")
    values: dict[str, Any] = {key: config[name] for key, name in PARAMS.items()}
    values |= {
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "vision_encoder": {"dim": 8},
        "moe": None,
    } | params
    (model_dir / "params.json").write_text(json.dumps(values))
    (model_dir / "model.safetensors").unlink()
    if not keeps_config:
        (model_dir / "config.json").unlink()
    return model_dir


NAMES = {
    "tok_embeddings.weight": "embed_tokens.weight",
    "norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
PARAMS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}


@pytest.mark.parametrize(("preset", "params"), [("mistral", {"sliding_window": 16}), ("mistral-full", {})])
def test_logits_of_mistrals_layout_are_those_of_the_other(preset: str, params: dict[str, Any], tmp_path: Path) -> None:
    model_dir = make_checkpoint(preset, tmp_path / "model", head_dim=32)
    oracle = load_oracle(model_dir)
    to_mistral(model_dir, keeps_config=bool(params), **params)  # config.json does not count beside these weights
    (model_dir / "tekken.json").write_text(json.dumps(tekken()))
    made = resolve_model(str(model_dir))
    assert (made / "tokenizer.json").is_file()
    (made / "generation_config.json").unlink(missing_ok=True)
    assert read_generation_defaults(made).eos_token_ids == (2,)
    prompt = np.random.default_rng(0).integers(0, 256, 40).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0, -1].numpy()
    assert relative_error(last_logits(made, prompt), expected) < 1e-4


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"moe": {"num_experts": 8}}, "params.json: moe is {'num_experts': 8}, which is not served from this layout"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "quantization is {'qformat_weight': 'fp8_e4m3'}"),
        ({"n_layers": 0}, "num_hidden_layers is 0"),
    ],
)
def test_parameter_that_is_not_served_is_named(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    model_dir = to_mistral(make_checkpoint("mistral-full", tmp_path / "model"), **params)
    with pytest.raises(StartupError) as refused:
        read_decoder_config(resolve_config(str(model_dir)))
    assert message in str(refused.value)


def test_hub_model_in_mistrals_layout_is_downloaded(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(tmp_path / "repository", tmp_path / "hub")
    hub.install(monkeypatch)
    to_mistral(make_checkpoint("mistral-full", hub.repository))
    (hub.repository / "tekken.json").write_text(json.dumps(tekken()))
    config_dir = resolve_config("owner/name")
    assert not list(hub.snapshot.glob("*.safetensors"))
    config = read_decoder_config(config_dir)
    made = resolve_model("owner/name", None, config_dir)
    open_weights(made, config).close()
    assert made.parent == cache
    assert {path.name for path in made.iterdir() if not path.is_symlink()} == {
        "config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
