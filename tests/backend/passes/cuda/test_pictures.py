"""Pictures in the CUDA pass on the emulator, against transformers: positions on three axes, features that the first
layers add, and tokens that see their whole picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.backend.checkpoint.config_json import parse_decoder_config
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import StepSizes, attention_by_window, make_layout
from penstock.backend.passes.vision.tower import VisionTower, with_pictures
from tests.backend.engine.test_speculation import Eager
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.vision.test_pictures import MODELS, check_answers
from tests.backend.passes.vision.test_pictures import make_oracle as make_gemma
from tests.backend.passes.vision.test_qwen_pictures import Prompt, QwenBench, check
from tests.backend.passes.vision.test_qwen_pictures import make_oracle as make_qwen
from tests.checkpoints import make_config

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ONE_HEAD: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1}
"""Of 64 numbers, the fewest that the kernels support."""
_IN_TURNS = {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
TEXTS: dict[str, dict[str, Any]] = {
    "qwen2-vl": _ONE_HEAD | {"rope_parameters": _ROPE | {"mrope_section": [8, 12, 12]}},
    "qwen3-vl": {"head_dim": 64, "rope_parameters": _ROPE | _IN_TURNS},
    "qwen3.5-vision": {
        "head_dim": 64,
        "linear_key_head_dim": 64,
        "rope_parameters": _ROPE | {"mrope_section": [6, 5, 5], "partial_rotary_factor": 0.5},
    },
}


def load(directory: Path, options: PassOptions) -> EmulatedCudaPass:
    served = EmulatedCudaPass.load(directory, options)
    served.picture_tower = VisionTower.load(directory, options)
    served._spec = with_pictures(served.spec, directory, options)
    return served


@pytest.mark.parametrize(
    ("name", "chunk"), [("qwen2-vl", 16), ("qwen3-vl", 7), ("qwen3-vl", 16), ("qwen3.5-vision", 16)]
)
def test_positions_and_features_of_pictures_are_those_of_transformers(name: str, chunk: int, tmp_path: Path) -> None:
    oracle = make_qwen(name, tmp_path, **TEXTS[name])
    bench = QwenBench(tmp_path, load, max_batch_tokens=chunk, page_size=16, drafting=Eager() if chunk < 16 else None)
    prompt = Prompt(bench.memory)
    bench.submit([9, 8, 7, 6], 30, request_id=1)
    bench.ask(prompt, 0)
    bench.run()
    check(bench, 0, oracle, prompt)
    drafted = [batch for batch in bench.executor.batches if batch.drafts is not None]
    assert any(batch.rope_positions is not None for batch in drafted) == (chunk < 16)
    bench.served.device.require_same_graphs()
    for graphs in (bench.served._graphs, bench.served._mixed_graphs._graphs):
        assert any(graph.num_replays for graph in graphs._graphs.values())
    bench.close()


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_tokens_of_pictures_see_them_whole(name: str, is_deterministic: bool, tmp_path: Path) -> None:
    text = MODELS[name].text_settings | {"head_dim": 64}
    model = replace(MODELS[name], text_settings=text | ({"global_head_dim": 128} if name == "gemma4" else {}))
    oracle = make_gemma(model, tmp_path)
    options = PassOptions(dtype="fp32", max_running=4, max_batch_tokens=20, deterministic=is_deterministic)
    served = load(tmp_path, options)
    assert served.spec.whole_picture_tokens > 0
    check_answers(served, model, oracle, sees_whole=True, page_size=16)


@pytest.mark.parametrize(("head_dim", "is_deterministic"), [(64, False), (64, True), (256, False)])
def test_warpgroups_multiply_where_pictures_have_the_same_tiles(head_dim: int, is_deterministic: bool) -> None:
    """A step is cut into tiles for its kernel, and pictures have one without products of warpgroups."""
    config = parse_decoder_config(make_config("gemma3", head_dim=head_dim).to_dict())
    sizes = StepSizes(4, 64, 256, is_deterministic)
    layout = make_layout(config, 1, 16, "bf16")
    attentions = attention_by_window(
        config, layout, sizes, torch.bfloat16, num_sms=1, shared_bytes_per_sm=164 << 10, has_wgmma=True
    )
    assert len(attentions) == 2
    for attention in attentions.values():
        assert any(kernel.needs_wgmma for kernel in attention.kernels()) == (head_dim == 64 and not is_deterministic)
