"""Quantised checkpoints as other programs write them: the weights that they stand for, and how they run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.backend.checkpoint.config.tensors import LayerWeights
from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.files.progress import LOADING
from penstock.backend.checkpoint.formats.declared import parse_stored_formats
from penstock.backend.checkpoint.formats.methods.gptq import Gptq
from penstock.backend.checkpoint.quantization import cached_file
from penstock.backend.checkpoint.quantization.modes import has_cpu_kernels
from penstock.backend.checkpoint.weight_forms.float8_weight import Float8Form, Float8Weight
from penstock.backend.checkpoint.weight_forms.quantized_forms import WeightForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import (
    GroupedWeight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
)
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from tests.backend.checkpoint.formats.quantizers import (
    Checkpoint,
    Tensors,
    awq,
    awq_gemv,
    awq_gemv_fast,
    fp8,
    gptq,
    llm_int8,
    load_reference,
    mlx,
    mxfp4_of_mlx,
    nf4,
    nvfp4_of_modelopt,
    random_scales,
    write_checkpoint,
)
from tests.backend.checkpoint.quantization.loading import Recorder
from tests.backend.checkpoint.weight_files import rewrite
from tests.backend.passes.decoder.driver import Driver
from tests.backend.passes.decoder.quantized_oracle import relative_error, replace_linear

NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head*", "*.router"]}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def by_library(
    layout: str, scale_shape: Callable[[int, int], tuple[int, int]], **weights: Any
) -> Callable[[np.random.Generator, int, int], tuple[Tensors, torch.Tensor]]:
    """Weights compressed by compressed-tensors, and what it makes of them again."""
    span = 8 if weights["num_bits"] == 4 else 128

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
        from compressed_tensors import compressors, quantization  # takes seconds

        scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**weights))
        compressor = {
            "pack-quantized": compressors.PackedQuantizationCompressor,
            "mxfp4-pack-quantized": compressors.MXFP4PackedCompressor,
            "nvfp4-pack-quantized": compressors.NVFP4PackedCompressor,
        }.get(layout, compressors.NaiveQuantizationCompressor)
        shape = scale_shape(outputs, inputs)
        state = {
            "weight": torch.from_numpy(rng.normal(0, 1, (outputs, inputs))).to(torch.bfloat16),
            "weight_scale": random_scales(rng, *shape, dtype=torch.bfloat16) * (6 if span == 8 else 1),
        }
        if "nvfp4" in layout:
            state["weight_scale"] *= 100
            state["weight_global_scale"] = torch.tensor([100 * rng.uniform(0.5, 2)], dtype=torch.float32)
        if not weights.get("symmetric", True):
            state["weight_zero_point"] = torch.from_numpy(rng.integers(-span // 2, span // 2, shape).astype(np.int8))
        parts = compressor.compress(state, scheme)
        return parts, compressor.decompress(parts, scheme)["weight"]

    return quantize


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
ASYMMETRIC = INT4 | {"symmetric": False}
CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}

CASES: dict[str, tuple[dict[str, Any], Any, type[Int4Weight | Int8Weight | Mxfp4Weight | GroupedWeight] | None]] = {
    "gptq": (GPTQ, gptq(), Int4Weight),
    "gptq, one group": (GPTQ | {"group_size": -1}, gptq(group_size=-1), Int4Weight),
    "gptq, groups of 64": (GPTQ | {"group_size": 64}, gptq(group_size=64), Int4Weight),
    "gptq, groups of 16": (GPTQ | {"group_size": 16}, gptq(group_size=16), None),
    "gptq, zero points": (GPTQ | {"sym": False}, gptq(zeros=(1, 16)), Int4Weight),
    "gptq, zero points of 16": (GPTQ | {"sym": False}, gptq(zeros=(16, 17)), None),
    "gptq, act-order": (GPTQ | {"desc_act": True}, gptq(act_order=True, zeros=(1, 16)), None),
    "gptq, 8 bits": (GPTQ | {"bits": 8, "group_size": 128}, gptq(8, 128, zeros=(100, 150)), None),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(offset=0, zeros=(0, 16)), Int4Weight),
    "awq": (AWQ, awq(), Int4Weight),
    "awq, groups of 128": (AWQ | {"group_size": 128}, awq(128), Int4Weight),
    "awq, gemv": (AWQ | {"version": "gemv"}, awq_gemv(32), Int4Weight),
    "awq, gemv, groups of 64": (AWQ | {"version": "gemv", "group_size": 64}, awq_gemv(64), Int4Weight),
    "awq, gemv, groups of 128": (AWQ | {"version": "GEMV", "group_size": 128}, awq_gemv(128), Int4Weight),
    "awq, gemv_fast": (AWQ | {"version": "gemv_fast"}, awq_gemv_fast(32), Int4Weight),
    "awq, gemv_fast, groups of 128": (
        AWQ | {"version": "GEMV_FAST", "group_size": 128},
        awq_gemv_fast(128),
        Int4Weight,
    ),
    "fp8, blocks": (FP8 | {"weight_block_size": [128, 128]}, fp8((128, 128)), None),
    "fp8, small blocks": (FP8 | {"weight_block_size": [48, 40]}, fp8((48, 40)), None),
    "fp8, one scale": (FP8 | {"activation_scheme": "static"}, fp8(None, "weight_scale"), None),
    "modelopt, fp8": (MODELOPT | {"quant_algo": "FP8"}, fp8(None, "weight_scale"), None),
    "modelopt, nvfp4": (MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}, nvfp4_of_modelopt, None),
    "auto-round": (AUTO_ROUND, gptq(), Int4Weight),
    "auto-round, 8 bits": (AUTO_ROUND | {"bits": 8}, gptq(8, zeros=(128, 129)), None),
    "auto-round, awq": (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, awq(), Int4Weight),
    **{f"mlx, {bits} bits": ({"bits": bits, "group_size": 64}, mlx(bits, 64), GroupedWeight) for bits in range(2, 7)},
    "mlx, 8 bits": ({"bits": 8, "group_size": 32}, mlx(8, 32, zeros=(128, 300)), GroupedWeight),
    "mlx, 8 bits, of one sign": ({"bits": 8, "group_size": 32}, mlx(8, 32, zeros=(1, 20)), None),
    "mlx, fp16, groups of 128": (
        {"bits": 4, "group_size": 128, "mode": "affine"},
        mlx(4, 128, torch.float16),
        GroupedWeight,
    ),
    "mlx, mxfp4": ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, mxfp4_of_mlx, Mxfp4Weight),
    "int8 per output": (
        compressed("int-quantized", **CHANNEL),
        by_library("int-quantized", lambda n, _: (n, 1), **CHANNEL),
        Int8Weight,
    ),
    "int8 per output, zero points": (
        compressed("int-quantized", **CHANNEL | {"symmetric": False}),
        by_library("int-quantized", lambda n, _: (n, 1), **CHANNEL | {"symmetric": False}),
        None,
    ),
    "int8 per matrix": (
        compressed("int-quantized", strategy="tensor"),
        by_library("int-quantized", lambda *_: (1, 1), num_bits=8, strategy="tensor"),
        Int8Weight,
    ),
    "packed int8": (
        compressed("pack-quantized", **CHANNEL),
        by_library("pack-quantized", lambda n, _: (n, 1), **CHANNEL),
        Int8Weight,
    ),
    "packed int4": (
        compressed("pack-quantized", **INT4),
        by_library("pack-quantized", lambda n, m: (n, m // 32), **INT4),
        Int4Weight,
    ),
    "packed int4, zero points": (
        compressed("pack-quantized", **ASYMMETRIC),
        by_library("pack-quantized", lambda n, m: (n, m // 32), **ASYMMETRIC),
        Int4Weight,
    ),
    "nf4": (NF4 | {"bnb_4bit_use_double_quant": False}, nf4(nested=False), None),
    "nf4, nested scales": (NF4, nf4(nested=True), None),
    "mxfp4": (
        compressed("mxfp4-pack-quantized", **MXFP4),
        by_library("mxfp4-pack-quantized", lambda n, m: (n, m // 32), **MXFP4),
        Mxfp4Weight,
    ),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", **NVFP4),
        by_library("nvfp4-pack-quantized", lambda n, m: (n, m // 16), **NVFP4),
        None,
    ),
    "llm.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8, None),
    "float8 per output": (
        compressed("float-quantized", **FLOAT, strategy="channel"),
        by_library("float-quantized", lambda n, _: (n, 1), **FLOAT, strategy="channel"),
        None,
    ),
    "float8 blocks": (
        compressed("float-quantized", **FLOAT, strategy="block", block_structure=[64, 32]),
        by_library(
            "float-quantized", lambda n, m: (n // 64, m // 32), **FLOAT, strategy="block", block_structure=[64, 32]
        ),
        None,
    ),
}


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    config, quantize, _ = CASES[request.param]
    return write_checkpoint(tmp_path, config, quantize)


def stacked_exact(checkpoint: Checkpoint, layer: int, field: str) -> torch.Tensor:
    names = {
        "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "o": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }[field]
    return torch.cat([checkpoint.exact[f"model.layers.{layer}.{name}.weight"] for name in names])


def read_layer(
    checkpoint: Checkpoint,
    keeps: Callable[[WeightForm], bool] = lambda _: False,
    dtype: torch.dtype = torch.float32,
) -> LayerWeights[Any]:
    config = read_decoder_config(checkpoint.path)
    with open_weights(checkpoint.path, config, keeps=keeps) as weights:
        return weights.layer(1, Dtype.of(dtype))


@pytest.mark.parametrize(("checkpoint", "name"), [(name, name) for name in CASES], indirect=["checkpoint"])
def test_weights_are_those_of_the_reference(checkpoint: Checkpoint, name: str) -> None:
    """Compares in fp32, and in the kernels' form where there is one."""
    plain, kept = read_layer(checkpoint), read_layer(checkpoint, has_cpu_kernels)
    for field in ("qkv", "o", "gate_up", "down"):
        exact = stacked_exact(checkpoint, 1, field)
        reference = exact.float() if exact.dtype is torch.float64 else exact
        assert torch.equal(getattr(plain, field).to(reference.dtype), reference)
        packed, form = getattr(kept, field), CASES[name][2]
        assert isinstance(packed, torch.Tensor if form is None else form)
        numbers = packed if isinstance(packed, torch.Tensor) else packed.dequantize()
        assert torch.equal(numbers.to(reference.dtype), reference)


@pytest.mark.parametrize(
    ("checkpoint", "name", "is_packed"),
    [
        ("fp8, blocks", "fp8, blocks", True),
        ("fp8, one scale", "fp8, one scale", True),
        ("float8 per output", "float8 per output", True),
        ("fp8, small blocks", "fp8, small blocks", False),
    ],
    indirect=["checkpoint"],
)
def test_8_bit_floats_stay_packed_where_kernels_take_them(checkpoint: Checkpoint, name: str, is_packed: bool) -> None:
    layer = read_layer(checkpoint, lambda form: isinstance(form, Float8Form))
    for field in ("qkv", "o", "gate_up", "down"):
        exact, found = stacked_exact(checkpoint, 1, field), getattr(layer, field)
        assert isinstance(found, Float8Weight if is_packed else torch.Tensor), name
        numbers = found.dequantize() if isinstance(found, Float8Weight) else found
        reference = exact.float() if exact.dtype is torch.float64 else exact
        assert torch.equal(numbers.to(reference.dtype), reference)


def oracle_model(checkpoint: Checkpoint, plain_dir: Path, *, rounds_activations: bool) -> Any:
    """transformers with the reference's weights."""
    model = load_reference(checkpoint, plain_dir)
    for name, weight in checkpoint.exact.items() if rounds_activations else ():
        replace_linear(model, name.removesuffix(".weight"), weight.float())
    return model


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        (name, name)
        for name in (
            *("gptq, zero points", "gptq, act-order", "awq", "fp8, blocks", "int8 per output", "packed int4"),
            *("nf4, nested scales", "llm.int8", "mxfp4", "nvfp4", "float8 per output", "mlx, 4 bits"),
        )
    ],
    indirect=["checkpoint"],
)
def test_logits_and_greedy_tokens_are_those_of_the_reference_weights(
    checkpoint: Checkpoint, name: str, tmp_path: Path
) -> None:
    """In transformers: of a prompt, and of 24 tokens where nothing is rounded.

    Kernels for int4 and int8 weights round activations to 8 bits.
    """
    is_packed = CASES[name][2] is not None
    prompt = np.random.default_rng(0).integers(0, 256, 33).tolist()
    options = PassOptions(dtype="fp32", max_running=4, max_batch_tokens=64)
    forward_pass = CpuDecoderPass.load(checkpoint.path, options)
    assert forward_pass.spec == CpuDecoderPass.describe(checkpoint.path, options)
    driver = Driver(forward_pass, num_pages=8, page_size=16)
    row = driver.add(prompt)
    logits = [driver.prefill()[row.slot], *(driver.step([(row, 1)])[row.slot] for _ in range(23))]
    forward_pass.close()
    model = oracle_model(checkpoint, tmp_path / "plain", rounds_activations=is_packed)
    with torch.inference_mode():
        expected = model(torch.tensor([row.tokens[:-1]])).logits[0, len(prompt) - 1 :].numpy()
    # Where a number lies halfway between two steps, it may be rounded either way, and all that follows changes a bit.
    # The library rounds products with 8-bit scales to bf16; ours are rounded only where that is the model's dtype.
    bound = 0.05 if is_packed else 0.02 if name in ("float8 per output", "nvfp4") else 1e-4
    assert relative_error(logits[0], expected[0]) < bound
    if bound == 1e-4:
        assert relative_error(np.stack(logits), expected) < bound
        assert row.tokens[len(prompt) :] == expected.argmax(axis=1).tolist()


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": []}


@pytest.mark.parametrize(
    "name", ["gptq, zero points", "gptq, act-order", "awq", "int8 per output", "packed int4", "fp8, blocks"]
)
def test_experts_run_as_other_linears_of_their_format(name: str, tmp_path: Path) -> None:
    """Each expert's tensors are their own in the file. The router is never quantised."""
    config, quantize, form = CASES[name]
    plain = ("lm_head", "embed_tokens", "mlp.gate")
    checkpoint = write_checkpoint(tmp_path, config, quantize, plain=plain, architecture="qwen3-moe", **EXPERTS)
    layer = read_layer(checkpoint, has_cpu_kernels)
    for found, parts in ((layer.expert_gate_up, ("gate_proj", "up_proj")), (layer.expert_down, ("down_proj",))):
        names = [f"model.layers.1.mlp.experts.{i}.{part}.weight" for i in range(4) for part in parts]
        exact = torch.cat([checkpoint.exact[name] for name in names])
        reference = exact.float() if exact.dtype is torch.float64 else exact
        assert isinstance(found, torch.Tensor if form is None else form)
        numbers = found if isinstance(found, torch.Tensor) else found.dequantize()
        assert torch.equal(numbers.to(reference.dtype), reference)


def test_experts_of_which_one_has_no_packed_form_are_dequantised(tmp_path: Path) -> None:
    """A zero point of 16 in the last one's tensors."""
    plain = ("lm_head", "embed_tokens", "mlp.gate")
    checkpoint = write_checkpoint(tmp_path, GPTQ, gptq(), plain=plain, architecture="qwen3-moe", **EXPERTS)
    name = "model.layers.1.mlp.experts.3.down_proj"
    rewrite(checkpoint.file, {f"{name}.qzeros": torch.full((4, 16), -1, dtype=torch.int32)})
    config = read_decoder_config(checkpoint.path)
    progress = Recorder(0, LOADING)
    with open_weights(checkpoint.path, config, lambda _: progress, keeps=has_cpu_kernels) as weights:
        layer = weights.layer(1, Dtype.FP32)
    assert isinstance(layer.expert_gate_up, Int4Weight)
    assert isinstance(layer.expert_down, torch.Tensor)
    stored = load_file(checkpoint.file)
    assert progress.done_bytes == sum(
        part.nbytes for name, part in stored.items() if name.startswith("model.layers.1.")
    )


def test_first_rule_of_gptq_that_matches_decides_about_a_linear() -> None:
    """GPTQModel's dynamic: changes of single linears, and exceptions."""
    dynamic = {
        r"-:.*layers\.0\.": {},
        r"+:.*layers\.[01]\..*down_proj": {"bits": 8, "group_size": -1},
        ".*up_proj": {"desc_act": True},
    }
    formats = parse_stored_formats({"quantization_config": GPTQ | {"dynamic": dynamic}})
    plain = Gptq(4, 32, act_order=False, zero_offset=1)
    expected = {
        "model.layers.0.mlp.down_proj.weight": None,
        "model.layers.1.mlp.down_proj.weight": replace(plain, bits=8, group_size=None),
        "model.layers.1.mlp.up_proj.weight": replace(plain, act_order=True),
        "model.layers.2.mlp.down_proj.weight": plain,
        "lm_head.weight": None,
    }
    assert {name: formats.of(name) for name in expected} == expected


def test_log_says_how_many_linears_run_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = write_checkpoint(tmp_path, GPTQ, gptq())
    config = read_decoder_config(checkpoint.path)
    with (
        caplog.at_level(logging.INFO, "penstock.backend"),
        open_weights(checkpoint.path, config, keeps=has_cpu_kernels) as weights,
    ):
        weights.layer(0, Dtype.FP32)
    assert "quantised linears 4 are multiplied as they are, 0 were dequantised" in caplog.text


def test_quantize_option_reads_a_quantised_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_file, "cache_directory", lambda: tmp_path)
    checkpoint = write_checkpoint(tmp_path / "model", FP8 | {"weight_block_size": [128, 128]}, fp8((128, 128)))
    forward_pass = CpuDecoderPass.load(checkpoint.path, PassOptions(quantize="int8"))
    assert forward_pass.spec.quantization == "int8"
    forward_pass.close()
