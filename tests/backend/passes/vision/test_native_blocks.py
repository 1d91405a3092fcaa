"""Blocks of vision towers by the kernels of each path, against torch: heads that are filled, turns, gates, windows."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig, InternVLVisionConfig, PixtralVisionConfig
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.internvl.modeling_internvl import InternVLVisionLayer
from transformers.models.pixtral.modeling_pixtral import PixtralAttentionLayer
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionBlock

from penstock.backend.dtypes import Dtype
from penstock.backend.passes.vision import native_blocks
from penstock.backend.passes.vision.native_blocks import saved_bytes, use_kernels
from tests.backend.passes.conftest import NATIVE
from tests.backend.passes.cpu.path_libraries import open_emulated_tiles, open_path

_SIZES = {"hidden_size": 192, "intermediate_size": 128, "num_attention_heads": 16, "attn_implementation": "sdpa"}
_QWEN = {"hidden_size": 192, "intermediate_size": 128, "num_heads": 16, "attn_implementation": "sdpa"}
_NUM_PATCHES = 70


def make_block(name: str) -> tuple[nn.Module, Any, torch.Tensor, dict[str, Any]]:
    """A random block, its config, its input and its other arguments."""
    x, angles = torch.randn(1, _NUM_PATCHES, 192), torch.rand(_NUM_PATCHES, 6) * 9
    turns = {"position_embeddings": (torch.cat([angles.cos()] * 2, 1), torch.cat([angles.sin()] * 2, 1))}
    config: Any
    match name:
        case "clip":
            config = CLIPVisionConfig(**_SIZES)
            return CLIPEncoderLayer(config), config, x, {"attention_mask": None}
        case "internvl":
            config = InternVLVisionConfig(**_SIZES, layer_scale_init_value=0.5)
            return InternVLVisionLayer(config), config, x, {}
        case "pixtral":
            config = PixtralVisionConfig(**_SIZES, hidden_act="silu")
            return PixtralAttentionLayer(config), config, x, {"attention_mask": None} | turns
    config = Qwen2_5_VLVisionConfig(**_QWEN)
    return Qwen2_5_VLVisionBlock(config), config, x[0], {"cu_seqlens": torch.tensor([0, 16, 50, _NUM_PATCHES])} | turns


@pytest.mark.parametrize("name", ["clip", "internvl", "pixtral", "qwen2.5"])
@pytest.mark.parametrize("path", NATIVE)
def test_blocks_have_the_results_of_torch(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = open_emulated_tiles() if path == "tiles" else open_path(path)
    kernels = SimpleNamespace(library=library, path=SimpleNamespace(uses_tiles=path in ("tiles", "amx")))
    monkeypatch.setattr(native_blocks, "load_kernels", lambda _: kernels)
    torch.manual_seed(1)
    block, config, x, arguments = make_block(name)
    block.eval().requires_grad_(requires_grad=False)
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.1 + (parameter.dim() == 1))
    due = block(x, **arguments)
    for dtype, tolerance in ((Dtype.FP32, 1e-5), (Dtype.BF16, 1e-2)):
        model: Any = nn.ModuleList([copy.deepcopy(block)])
        linear_bytes = 4 * sum(each.numel() for each in model.parameters() if each.dim() == 2)
        saved = saved_bytes(model, config, dtype)
        use_kernels(model, config, "auto", dtype)
        result = model[0](x, **arguments)
        assert (result - due).norm() < tolerance * (due - x).norm()
        assert torch.equal(result, model[0](x, **arguments))
        engine = model[0].forward.func.__self__
        assert linear_bytes - saved == engine._packer.linear_bytes
        assert not any(each.numel() for each in model.parameters())
