"""`penstock inspect` against transformers' own counts, and on models that cannot be served."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import msgspec
import pytest
import torch
import transformers
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo

from penstock.backend.checkpoint.gguf import cached_directories
from penstock.commands.inspect_model.config_fields import read_fields
from penstock.commands.inspect_model.description import (
    ModelDescription,
    TensorHeader,
    count_parameters,
    describe_model,
    read_directory,
)
from penstock.main import app
from penstock.tools.random_model import ModelDims, write_random_model
from tests.backend.checkpoint.formats.test_fused_experts import write_pair
from tests.backend.checkpoint.gguf.writer import byte_level_vocabulary, from_model
from tests.backend.checkpoint.weight_files import INDEX, name_twice
from tests.backend.passes.transformers_model.families import make_family
from tests.checkpoints import load_oracle, make_checkpoint, make_model
from tests.encoder_checkpoints import make_encoder
from tests.lora import make_adapter

DIMS = ModelDims(hidden_size=64, layers=3, heads=4, kv_heads=2, intermediate_size=96, vocab_size=1000, max_context=256)


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(["inspect", *argv])
    return int(ended.value.code or 0)


def describe(model: str | Path, capsys: pytest.CaptureFixture[str]) -> ModelDescription:
    run(str(model), "--json")
    return msgspec.json.decode(capsys.readouterr().out, type=ModelDescription)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_random_model(tmp_path / "model", DIMS, max_shard_bytes=100_000)
    return tmp_path / "model"


def edit_config(model_dir: Path, **changes: Any) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_served_model_has_the_counts_of_transformers(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = describe(sharded, capsys)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(sharded)
    assert described.not_served_because is None
    assert described.parameters == described.active_parameters == oracle.num_parameters()
    assert described.weight_dtypes == {"BF16": 2 * oracle.num_parameters()}
    assert described.weight_files == len(list(sharded.glob("*.safetensors"))) > 1
    assert described.kv_bytes_per_token["bf16"] == 2 * 2 * DIMS.layers * DIMS.kv_heads * 16
    assert (described.layers, described.heads, described.kv_heads, described.head_dim) == (3, 4, 2, 16)
    assert described.context_tokens == 256


def test_text_names_every_part(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(sharded)) == 0
    lines = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert lines["architecture"] == "LlamaForCausalLM"
    assert lines["served"] == "yes"
    assert lines["heads"] == "4 of 16, 2 for keys and values"
    assert lines["widths"] == "hidden 64, MLP 96, vocabulary 1,000"
    assert lines["KV cache"].startswith("bytes a token: 384 in bf16")


def test_encoder_has_a_task_and_vectors(tmp_path: Path) -> None:
    make_encoder("distilbert", "ForSequenceClassification", tmp_path, num_labels=1)
    described = describe_model("it", tmp_path, read_directory(tmp_path), is_local=True)
    assert (described.task, described.vectors) == ("rerank", {"classify": 1, "token_embed": 64})
    assert (described.layers, described.hidden_size, described.heads) == (2, 64, 4)
    (tmp_path / "config.json").write_text('{"architectures": ["AlbertModel"]}')
    refused = describe_model("it", tmp_path, read_directory(tmp_path), is_local=True)
    assert "its layers share one set of weights" in str(refused.not_served_because)


def test_missing_shard_is_named(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = describe(sharded, capsys)
    last = max(sharded.glob("*.safetensors"))
    last.unlink()
    described = describe(sharded, capsys)
    assert described.missing_files == (last.name,)
    assert f"1 of {whole.weight_files} weight files are missing: {last.name}" in str(described.not_served_because)
    assert described.parameters < whole.parameters


def test_unserved_architecture_is_described_all_the_same(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_config(sharded, architectures=["UnheardOfForCausalLM"])
    assert run(str(sharded)) == 1
    capsys.readouterr()
    described = describe(sharded, capsys)
    assert "does not know 'UnheardOfForCausalLM': serve it with --forward" in str(described.not_served_because)
    edit_config(sharded, model_type="unheard-of")
    described = describe(sharded, capsys)
    assert "model type `unheard-of`" in str(described.not_served_because)
    assert (described.layers, described.kv_bytes_per_token) == (3, {})
    edit_config(sharded, architectures=["LlamaForCausalLM"], model_type="llama", attention_bias="?")
    assert describe(sharded, capsys).kv_bytes_per_token == {"bf16": 384}


def test_model_that_only_its_own_code_serves_is_said_to_be_so(
    sharded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(sharded, architectures=["ArceeForCausalLM"], model_type="arcee", hidden_act="relu2")
    described = describe(sharded, capsys)
    assert "serve it with --forward-pass transformers" in str(described.not_served_because)
    assert described.kv_bytes_per_token["bf16"] == 384
    assert run(str(sharded), "--forward-pass", "transformers") == 0
    assert "bytes a token: 384 in bf16" in capsys.readouterr().out


@pytest.mark.parametrize("forward_pass", ["auto", "transformers"])
def test_state_space_model_has_no_size_of_a_kv_cache(
    forward_pass: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_family("mamba", tmp_path)
    edit_config(tmp_path, num_attention_heads=4)  # some conversions leave it in the file
    assert run(str(tmp_path), "--forward-pass", forward_pass) == 1
    out = capsys.readouterr().out
    assert "MambaForCausalLM keeps a state and no KV cache; the forward pass transformers cannot serve it" in out
    assert "bytes a token: unknown" in out


def test_hybrid_model_has_keys_and_values_of_its_attention_layers_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of three layers has attention: 2 heads of 16. The others keep a state, without the input that leaves next."""
    described = describe(make_family("qwen3-next", tmp_path), capsys)
    assert described.kv_bytes_per_token["bf16"] == 2 * 2 * 2 * 16
    cache = load_oracle(tmp_path)(torch.arange(9).unsqueeze(0)).past_key_values
    linear = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    states = [state for layer in linear for state in (layer.conv_states[0][..., 1:], layer.recurrent_states[0])]
    assert described.state_bytes_per_sequence == sum(state.nbytes for state in states)


def test_tensor_named_twice_is_refused(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = json.loads((sharded / INDEX).read_text())["weight_map"]["model.norm.weight"]
    name_twice(sharded / shard, "model.norm.weight")
    assert run(str(sharded)) == 1
    assert capsys.readouterr().err.strip().endswith("the header: 'model.norm.weight' occurs twice")


def test_wrong_shape_is_the_reason(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_config(sharded, intermediate_size=128)
    assert "tensor model.layers.0.mlp.gate_proj.weight has shape [96, 64]" in str(
        describe(sharded, capsys).not_served_because
    )


def test_broken_tokenizer_is_the_reason(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sharded / "tokenizer.json").unlink()
    reason = str(describe(sharded, capsys).not_served_because)
    assert reason.startswith(f"no tokenizer.json in {sharded}; copy it there")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("", "generic", None),
        ("{{ tools }}<tool_call>", "hermes", None),
        ("{{ tools }}[TOOL_CALLS]<think></think>", "mistral", "think"),
    ],
)
def test_formats_come_from_the_template(
    template: str, tools: str, reasoning: str | None, sharded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sharded / "chat_template.jinja").write_text(template)
    described = describe(sharded, capsys)
    assert (described.tool_format, described.reasoning_format) == (tools, reasoning)
    assert described.chat is not None
    assert described.chat.reasoning_marks == (None if reasoning is None else ("<think>", "</think>"))
    assert (described.chat.part_roles, described.chat.developer_role) == ((), False)
    run(str(sharded))
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["messages", "as one text; developer is written as system"] in lines


def test_experts_that_a_token_does_not_use_are_not_active(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=64,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    total, in_experts = count_parameters(read_directory(tmp_path).tensors, 8)
    assert total == model.num_parameters()
    assert in_experts == 2 * 8 * 3 * 32 * 16
    fields = read_fields(json.loads((tmp_path / "config.json").read_text()), "config.json")
    assert (fields.experts, fields.active_experts) == (8, 2)


QUANTIZED = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq, 4 bits, groups of 128"),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8, 8 bits, blocks of 128 × 128"),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, 4 bits"),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
        },
        "compressed-tensors pack-quantized, 4 bits, groups of 32",
    ),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantisation_is_named(name: str) -> None:
    settings, text = QUANTIZED[name]
    quantization = read_fields({"quantization_config": settings}, "config.json").quantization_config
    assert quantization is not None
    assert quantization.text == text


@pytest.mark.parametrize(
    ("tensors", "bits"),
    [
        ({"qweight": ("I32", (16, 64)), "qzeros": ("I32", (1, 8)), "scales": ("F16", (1, 64))}, 4),
        ({"weight_packed": ("I32", (64, 16)), "weight_scale": ("BF16", (64, 4)), "weight_shape": ("I64", (2,))}, 4),
        ({"weight": ("U8", (4096, 1)), "weight.absmax": ("F32", (128,))}, 4),
        ({"weight": ("F8_E4M3", (64, 128)), "weight_scale_inv": ("F32", (1, 1))}, 8),
        ({"weight": ("I8", (64, 128)), "weight_scale": ("BF16", (64, 1))}, 8),
    ],
)
def test_packed_weights_are_counted_one_by_one(tensors: dict[str, tuple[str, tuple[int, ...]]], bits: int) -> None:
    item_bytes = {"I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1}
    headers = {
        f"model.layers.0.mlp.up_proj.{name}": TensorHeader(dtype, shape, item_bytes[dtype] * shape[0] * (*shape, 1)[1])
        for name, (dtype, shape) in tensors.items()
    }
    assert count_parameters(headers, bits) == (64 * 128, 0)


def test_experts_in_mxfp4_are_counted_one_by_one(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, (120, 130))
    found, expected = (
        count_parameters(read_directory(path).tensors, bits) for path, bits in ((pair.packed, 4), (pair.plain, 8))
    )
    assert found == expected


def test_gguf_file_is_described_by_its_block_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cached_directories, "cache_directory", lambda: tmp_path / "cache")
    model = make_model("llama2", hidden_size=256, num_hidden_layers=2, intermediate_size=512, vocab_size=320)
    file = from_model("llama", model, lambda _: "Q4_K", byte_level_vocabulary(320))
    assert run(str(file.write(tmp_path / "model.gguf")), "--json") == 0
    described = msgspec.json.decode(capsys.readouterr().out, type=ModelDescription)
    assert described.quantization == "Q4_K"
    assert described.parameters == model.num_parameters()
    assert set(described.weight_dtypes) == {"Q4_K", "F32"}
    assert described.layers == 2
    assert described.memory_bytes is not None
    assert described.memory_bytes > described.weight_bytes  # the embedding is dequantised


def test_hub_model_needs_headers_only(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    local = describe(sharded, capsys)
    headers = read_directory(sharded)
    weights = ("model.safetensors", "model-00001-of-00002.safetensors", "2_Dense/model.safetensors")

    def fetch(repo_id: str, *, revision: str) -> SafetensorsRepoMetadata:
        assert (repo_id, revision) == ("some/model", "v1")
        tensors = {
            name: TensorInfo(dtype=tensor.dtype, shape=list(tensor.shape), data_offsets=(0, tensor.num_bytes))  # type: ignore[arg-type]
            for name, tensor in headers.tensors.items()
        }
        files = {"model.safetensors": SafetensorsFileMetadata(metadata={}, tensors=tensors)}
        return SafetensorsRepoMetadata(metadata={}, sharded=False, weight_map={}, files_metadata=files)

    def download(_repo_id: str, *, revision: str, allow_patterns: list[str], tqdm_class: object) -> str:
        assert revision == "v1"
        assert not any(fnmatch(file, pattern) for file in weights for pattern in allow_patterns)
        return str(sharded)

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", fetch)
    monkeypatch.setattr("penstock.backend.checkpoint.hub.list_sizes", lambda *_: {})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert run("some/model", "--revision", "v1", "--json") == 0
    described = msgspec.json.decode(capsys.readouterr().out, type=ModelDescription)
    assert described == msgspec.structs.replace(local, model="some/model", weight_files=1)


def test_hub_model_without_safetensors_is_refused(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(*_: Any, **__: Any) -> SafetensorsRepoMetadata:
        raise huggingface_hub.errors.NotASafetensorsRepoError("none")

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", fetch)
    monkeypatch.setattr("penstock.backend.checkpoint.hub.list_sizes", lambda *_: {})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(sharded))
    monkeypatch.setattr("penstock.backend.checkpoint.hub.list_sizes", lambda *_: {})
    monkeypatch.chdir(tmp_path)
    assert run("some/model") == 1
    assert capsys.readouterr().err == "penstock show: the hub's model some/model has no safetensors files\n"


@pytest.mark.parametrize("values", [{"num_experts": -1}, {"head_dim": "x"}, {"quantization_config": {"bits": 1.5}}])
def test_bad_config_is_one_line(values: dict[str, Any], sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_config(sharded, **values)
    assert run(str(sharded)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert next(iter(values)) in line


def test_adapter_is_described_and_compared_with_its_base_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_checkpoint("llama3", tmp_path / "base")
    adapter = make_adapter(load_oracle(base), tmp_path / "sql", rank=4, targets=("q_proj", "o_proj"), use_rslora=True)
    assert run(str(adapter)) == 0
    lines = capsys.readouterr().out
    assert "unknown: give its base model with --base" in lines
    assert "4, alpha 16, rank-stabilised" in lines
    assert "o_proj, q_proj" in lines
    assert f"parameters    {3 * 2 * 2 * 4 * 64:,}" in lines
    assert run(str(adapter), "--base", str(base)) == 0
    assert f"yes, with {base}" in capsys.readouterr().out
    other = make_checkpoint("llama3", tmp_path / "other", hidden_size=96, head_dim=24)
    assert run(str(adapter), "--base", str(other), "--json") == 1
    described = json.loads(capsys.readouterr().out)
    assert "; with this base model and the rank in adapter_config.json it is [" in described["not_served_because"]
    assert described["parameters"] == 3 * 2 * 2 * 4 * 64
