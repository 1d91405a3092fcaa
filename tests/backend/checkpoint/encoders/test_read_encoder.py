"""Files of encoders: what they make of the model, its task, and one line for each that is wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from penstock.backend.checkpoint.encoders.families import FAMILIES
from penstock.backend.checkpoint.encoders.read_config import read_encoder
from penstock.backend.checkpoint.encoders.tasks import find_task
from penstock.backend.checkpoint.encoders.weights import open_encoder
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.forward_pass import DecoderPass
from penstock.backend.passes.encoder.forward_pass import EncoderPass
from tests.backend.checkpoint.weight_files import rewrite
from tests.encoder_checkpoints import make_encoder, make_sentence_encoder

if TYPE_CHECKING:
    from pathlib import Path

GTE = {
    "architectures": ["NewModel"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "position_embedding_type": "rope",
    "rope_theta": 20000,
    "rope_scaling": {"type": "ntk", "factor": 8.0},
    "type_vocab_size": 1,
    "pack_qkv": True,
}
NOMIC = {
    "architectures": ["NomicBertModel"],
    "vocab_size": 96,
    "n_embd": 64,
    "n_inner": 80,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 8192,
    "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-12,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_scaling_factor": None,
    "qkv_proj_bias": False,
    "type_vocab_size": 2,
}

DEBERTA = {
    "architectures": ["DebertaV2Model"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "relative_attention": True,
    "share_att_key": True,
    "position_biased_input": False,
    "pos_att_type": "p2c|c2p",
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 32,
}


def write_config(path: Path, values: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(values))
    return path


def test_gte_of_the_hub_scales_its_frequencies(tmp_path: Path) -> None:
    config = read_encoder(write_config(tmp_path, GTE))
    dim = 16
    wanted = [(20000 * 8.0) ** (-2 * i / dim) / 8.0 ** (2 / dim) for i in range(dim // 2)]
    assert config.ropes[0].inv_freq == pytest.approx(wanted, rel=1e-5)
    assert (config.num_positions, config.num_token_types, config.max_context_tokens) == (0, 1, 8192)


def test_nomic_of_the_hub_has_names_of_its_own(tmp_path: Path) -> None:
    config = read_encoder(write_config(tmp_path, NOMIC))
    assert (config.hidden_size, config.num_layers, config.max_context_tokens) == (64, 2, 8192)
    assert (config.activation, config.is_gated, config.qkv_bias, config.mlp_out_bias) == ("silu", True, False, False)
    scaled = NOMIC | {"rotary_scaling_factor": 2, "max_trained_positions": 2048}
    assert read_encoder(write_config(tmp_path, scaled)).max_context_tokens == 2048


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (GTE | {"architectures": ["AlbertModel"]}, "AlbertModel is not supported: its layers share one set of weights"),
        (GTE | {"architectures": ["LlamaForCausalLM"]}, "architectures is .*; it must name an encoder"),
        (GTE | {"layer_norm_type": "rms_norm"}, "layer_norm_type is 'rms_norm'; of NewModel only 'layer_norm'"),
        (GTE | {"num_attention_heads": 7}, "hidden_size is 64; it must be a multiple of num_attention_heads, 7"),
        (GTE | {"hidden_act": "mish"}, "hidden_act is 'mish'; supported are gelu"),
        (GTE | {"rope_scaling": {"type": "ntk"}}, "rope_scaling is of type ntk; it needs a factor"),
        (GTE | {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "mixed_b is 0.6; only null is"),
        (GTE | {"vocab_size": -1}, "NewModel: vocab_size is -1; expected"),
        (DEBERTA | {"architectures": ["DebertaV2ForMaskedLM"]}, "of DebertaV2 only Model, ForSequence"),
        (DEBERTA | {"conv_kernel_size": 3}, "conv_kernel_size is 3; of DebertaV2Model only 0 is supported"),
        (DEBERTA | {"position_biased_input": None}, "position_biased_input is True; .* only False is supported"),
        (DEBERTA | {"pos_att_type": ["c2p"]}, "pos_att_type is .*c2p.*; of DebertaV2Model only 'p2c|c2p'"),
        (DEBERTA | {"position_buckets": 318}, "position_buckets is 318; half of it must be below 159, the farthest"),
    ],
)
def test_a_bad_config_is_one_line(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=message) as caught:
        read_encoder(write_config(tmp_path, values))
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "pooling_mode is .*median.*; supported are cls, mean"),
        ("1_Pooling/config.json", {"pooling_mode_attention": True}, "pooling_mode_attention is not a pooling mode"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt is False; only true"),
        ("2_Dense/config.json", {"in_features": 9, "out_features": 4, "bias": False}, "9 inputs; .* makes 64"),
        ("2_Dense/config.json", {"in_features": 64, "out_features": 0}, "out_features is 0; expected"),
        ("modules.json", [{"path": "", "type": "a.WordWeights"}], "type is 'WordWeights'; supported modules are"),
        ("modules.json", [{"path": "../x", "type": "a.Pooling"}], "path is '../x'; it must be a folder"),
        ("modules.json", {}, "is not a list of modules"),
    ],
)
def test_bad_modules_are_one_line(file: str, values: Any, message: str, tmp_path: Path) -> None:
    make_sentence_encoder("bert", tmp_path, {"pooling_mode_cls_token": True}, dense=8)
    (tmp_path / file).write_text(json.dumps(values))
    with pytest.raises(StartupError, match=message) as caught:
        read_encoder(tmp_path)
    assert str(tmp_path / file) in str(caught.value) or "inputs" in message


@pytest.mark.parametrize(("rows", "vocab_size"), [(90, 90), (128, 96)])
def test_resized_vocabulary_has_the_rows_that_count(rows: int, vocab_size: int, tmp_path: Path) -> None:
    """vocab_size in config.json is 96."""
    make_encoder("bert", "ForMaskedLM", tmp_path)
    words, bias = torch.randn(rows, 64), torch.randn(rows)
    rewrite(
        tmp_path / "model.safetensors", {"bert.embeddings.word_embeddings.weight": words, "cls.predictions.bias": bias}
    )
    config = read_encoder(tmp_path)
    assert config.vocab_size == vocab_size
    with open_encoder(tmp_path, config) as weights:
        assert torch.equal(weights.words(), words[:vocab_size])
        assert torch.equal(weights.head_layer(config.heads[0].layers[-1]).bias, bias[:vocab_size])  # type: ignore[arg-type]


def test_every_classifier_of_transformers_is_described_or_refused_in_one_line(tmp_path: Path) -> None:
    """With its default configuration, and the model that it is made of."""
    answers = {}
    for mapping in (auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES):
        for model_type, classifier in mapping.items():
            values = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
            base = auto.MODEL_MAPPING_NAMES[model_type]
            for name in (classifier, base if isinstance(base, str) else base[0]):
                write_config(tmp_path, values | {"architectures": [name]})
                try:
                    served_by = EncoderPass if find_task(tmp_path).is_encoder else DecoderPass
                    served_by.describe(tmp_path, PassOptions())
                    answers[name] = ""
                except StartupError as error:
                    answers[name] = str(error)
    assert len(answers) > 250
    assert [answer for answer in answers.values() if "\n" in answer or len(answer) > 400] == []
    families = [name for name in FAMILIES if name not in ("New", "DebertaV2")]  # the hub's, and one refused by default
    assert {
        answers[f"{family}{suffix}"] for family in families for suffix in ("Model", "ForSequenceClassification")
    } == {""}
    assert answers["Qwen3ForSequenceClassification"] == answers["LlamaModel"] == ""
    assert "architecture 'ElectraForMaskedLM'" in answers["ElectraForMaskedLM"]
    assert "architecture 'BartForSequenceClassification' is not supp" in answers["BartForSequenceClassification"]


def test_tensors_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    make_encoder("bert", "Model", tmp_path)
    config, path = read_encoder(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(path)
    position = "embeddings.position_embeddings.weight"
    save_file(tensors | {position: torch.zeros(128, 64)}, path)
    with pytest.raises(StartupError, match=rf"{position} has shape \[128, 64\]; config.json makes it \[160, 64\]"):
        open_encoder(tmp_path, config)
    save_file(tensors | {"embeddings.LayerNorm.gamma": torch.zeros(64)}, path)
    with pytest.raises(
        StartupError, match=r"tensor 'embeddings\.LayerNorm\.\w+' is another 'embeddings.LayerNorm.weight'"
    ):
        open_encoder(tmp_path, config)
    name = "encoder.layer.1.output.dense.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
    with pytest.raises(StartupError, match=rf"tensor {name}, expected with shape \[64, 80\], is missing"):
        open_encoder(tmp_path, config)


def test_norms_of_old_files_are_found(tmp_path: Path) -> None:
    make_encoder("bert", "ForMaskedLM", tmp_path)
    config, path = read_encoder(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(path)
    with open_encoder(tmp_path, config) as weights:
        norm = weights.embedding_norm()
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for key, tensor in tensors.items()
    }
    save_file(old, path)
    with open_encoder(tmp_path, config) as weights:
        torch.testing.assert_close(weights.embedding_norm(), norm)


@pytest.mark.parametrize(
    ("values", "task", "is_encoder"),
    [
        ({"architectures": ["BertModel"]}, "embed", True),
        ({"architectures": ["BertForMaskedLM"]}, "sparse", True),
        ({"architectures": ["XLMRobertaForSequenceClassification"], "id2label": {"0": "x"}}, "rerank", True),
        (
            {"architectures": ["DistilBertForSequenceClassification"], "id2label": {"0": "x", "1": "y"}},
            "classify",
            True,
        ),
        ({"architectures": ["ModernBertForTokenClassification"]}, "token-classify", True),
        ({"architectures": ["LlamaForCausalLM"]}, "generate", False),
        ({"architectures": ["Qwen3Model"]}, "embed", False),
        ({"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}, "rerank", False),
    ],
)
def test_the_task_follows_from_the_files(values: dict[str, Any], task: str, is_encoder: bool, tmp_path: Path) -> None:
    found = find_task(write_config(tmp_path, values))
    assert (found.task, found.is_encoder) == (task, is_encoder)


def test_modules_decide_the_task(tmp_path: Path) -> None:
    write_config(tmp_path, {"architectures": ["Qwen3ForCausalLM"]})
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    (tmp_path / "modules.json").write_text('[{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]')
    assert find_task(tmp_path).task == "embed"
    write_config(tmp_path, {"architectures": ["BertForMaskedLM"]})
    assert find_task(tmp_path).task == "embed"
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_strategy": "max"}')
    (tmp_path / "modules.json").write_text('[{"path": "1_Pooling", "type": "x.SpladePooling"}]')
    assert find_task(tmp_path).task == "sparse"


@pytest.mark.parametrize(
    ("stated", "of_tokenizer", "limit"),
    [
        (None, 24, 24),  # as sentence-transformers 6 writes it
        ({"transformer_task": "feature-extraction"}, 24, 24),
        ({"max_seq_length": 20}, 24, 20),
        ({"max_seq_length": 30}, 24, 30),
        ({"max_seq_length": None}, 10**30, 160),
        (None, 4096, 160),
        (None, True, 160),
        (None, -1, 160),
    ],
)
def test_the_limit_of_an_input_is_that_of_the_files(
    stated: dict[str, Any] | None, of_tokenizer: Any, limit: int, tmp_path: Path
) -> None:
    make_encoder("bert", "Model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": of_tokenizer}))
    if stated is not None:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps(stated))
    assert read_encoder(tmp_path).max_context_tokens == limit
