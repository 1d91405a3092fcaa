"""Reading adapters: what is refused, in one line that names the key or the tensor."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.tensor_files.lora_adapter import PeftAdapter, adapter_id
from penstock.backend.errors import StartupError
from tests.checkpoints import load_oracle, make_checkpoint
from tests.lora import PREFIX, make_adapter, updates

Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama3", tmp_path_factory.mktemp("base"))


@pytest.fixture
def adapter_dir(model_dir: Path, tmp_path: Path) -> Path:
    return make_adapter(load_oracle(model_dir), tmp_path / "adapter", rank=4)


def open_refused(model_dir: Path, adapter_dir: Path, match: str) -> None:
    with pytest.raises(StartupError, match=match) as caught:
        PeftAdapter(adapter_dir, read_decoder_config(model_dir))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only \"LORA\""),
        ({"use_dora": True}, "use_dora is True; this is not supported: DoRA"),
        ({"bias": "all"}, "bias is 'all'; only \"none\""),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]; .* whole modules are trained"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is .* embeddings are trained"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is .*experts"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'; .*convert it"),
        ({"r": 513}, "r is 513; .*<= 512"),
        ({"r": 0}, "r is 0; .*>= 1"),
        ({"r": 8}, r"lora_A.* has shape \[4, 96\]; .*the rank in adapter_config.json it is \[8, 96\]"),
        ({"rank_pattern": {"q_proj": 6}}, r"q_proj.lora_A.weight has shape \[4, 64\]; .*it is \[6, 64\]"),
        ({"alpha_pattern": {"(": 6}}, "the pattern '\\(' is no regular expression"),
        ({"rank_pattern": {"(a|a)+b": 6}}, r"the pattern '\(a\|a\)\+b' has '\)\+b'; patterns may have"),
        ({"rank_pattern": {"(?=a)": 6}}, r"the pattern '\(\?=a\)' has '\?=a\)'"),
        ({"rank_pattern": {"a**": 6}}, r"the pattern 'a\*\*' has '\*'"),
        ({"rank_pattern": {"(.|.)" * 5: 6}}, "has 5 groups and repetitions, all up to it 5; the limits are 4 and 32"),
        ({"rank_pattern": {f"{n}.*": 6 for n in range(33)}}, "has 1 groups and repetitions, all up to it 33"),
        ({"rank_pattern": {"a)(b": 6}}, r"the pattern 'a\)\(b' is no regular expression: unbalanced"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
    ],
)  # fmt: skip
def test_config_that_is_not_covered_is_refused_by_its_key(
    changes: dict[str, Any], match: str, model_dir: Path, adapter_dir: Path
) -> None:
    path = adapter_dir / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    open_refused(model_dir, adapter_dir, match)


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        (f"{PREFIX}{Q_PROJ}.lora_magnitude_vector", (64,), "belongs to DoRA"),
        (f"{PREFIX}model.embed_tokens.lora_embedding_A", (4, 256), "changes the embeddings"),
        (f"{PREFIX}lm_head.lora_A.weight", (4, 64), "changes the output layer"),
        (f"{PREFIX}model.layers.0.mlp.experts.3.up_proj.lora_A.weight", (4, 64), "changes experts or their router"),
        (f"{PREFIX}model.layers.9.self_attn.q_proj.lora_A.weight", (4, 64), "for layer 9; the base model has 3"),
        (f"{PREFIX}model.layers.0.self_attn.qkv_proj.lora_A.weight", (4, 64), "the base model does not have"),
        (f"{PREFIX}{Q_PROJ}.weight", (64, 64), "is neither a lora_A.weight nor a lora_B.weight"),
        (f"{PREFIX}{Q_PROJ}.lora_B.weight", (96, 4), r"has shape \[96, 4\]; .*it is \[64, 4\]: use the adapter with"),
        (f"{PREFIX}{Q_PROJ}.lora_A.weight", (5, 64), r"has shape \[5, 64\]; .*it is \[4, 64\]"),
        (f"{PREFIX}{Q_PROJ}.lora_A.weight", None, rf"{Q_PROJ}.lora_A.weight is missing; '{Q_PROJ}.lora_B"),
    ],
)  # fmt: skip
def test_tensor_that_is_not_covered_is_refused_by_its_name(
    name: str, shape: tuple[int, ...] | None, match: str, model_dir: Path, adapter_dir: Path
) -> None:
    path = adapter_dir / "adapter_model.safetensors"
    tensors = load_file(path)
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, path)
    open_refused(model_dir, adapter_dir, match)


def test_files_that_are_no_adapter_are_refused(model_dir: Path, adapter_dir: Path) -> None:
    path = adapter_dir / "adapter_model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-8])
    open_refused(model_dir, adapter_dir, "is truncated")
    save_file({}, path)
    open_refused(model_dir, adapter_dir, "has no tensors")
    path.rename(adapter_dir / "adapter_model.bin")
    open_refused(model_dir, adapter_dir, r"has adapter_model.bin; only adapter_model.safetensors is read")


def test_matrices_are_those_of_the_file_and_the_id_follows_every_byte(model_dir: Path, adapter_dir: Path) -> None:
    with PeftAdapter(adapter_dir, read_decoder_config(model_dir)) as adapter:
        assert (adapter.rank, adapter.modules[:2]) == (4, ["down_proj", "gate_proj"])
        found = adapter.layer(1)["qkv"][1]
    down, up, scale = updates(adapter_dir)["model.layers.1.self_attn.k_proj"]
    assert found.first_output == 64
    assert torch.equal(found.down, down)
    assert torch.equal(found.up, scale * up)
    path = adapter_dir / "adapter_model.safetensors"
    first, content = adapter_id(adapter_dir), path.read_bytes()
    assert re.fullmatch("[0-9a-f]{24}", first)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert adapter_id(adapter_dir) != first


def test_memory_counts_ranks_padded_to_four(model_dir: Path, tmp_path: Path) -> None:
    directory = make_adapter(load_oracle(model_dir), tmp_path / "adapter", rank=1)
    shapes = {name: tensor.shape for name, tensor in load_file(directory / "adapter_model.safetensors").items()}
    with PeftAdapter(directory, read_decoder_config(model_dir)) as adapter:
        padded = (4 * shape[1] if "lora_A" in name else shape[0] for name, shape in shapes.items())
        assert adapter.num_values == sum(padded)
