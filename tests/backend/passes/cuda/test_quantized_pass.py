"""The CUDA pass with quantised weights on the emulator, against transformers with the same weights dequantised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.gguf import cached_directories
from penstock.backend.checkpoint.hub import resolve_model
from penstock.backend.checkpoint.quantization import cached_file
from penstock.backend.checkpoint.quantization.modes import QUANTIZATIONS, linear_specs
from penstock.backend.checkpoint.quantization.quantized_checkpoint import open_quantized
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.passes.decoder.forward_pass import DecoderPass
from penstock.tools.gpu.cases.products.rounded import rounded
from tests.backend.checkpoint.formats.quantizers import (
    fp8,
    int8,
    load_reference,
    write_checkpoint,
)
from tests.backend.checkpoint.gguf.test_gguf_models import SIZES, mixed
from tests.backend.checkpoint.gguf.writer import byte_level_vocabulary, from_model
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.cuda.tiny_models import checkpoint, oracle_logits, prompts, run_prompts
from tests.backend.passes.decoder.driver import Driver
from tests.backend.passes.decoder.quantized_oracle import relative_error
from tests.checkpoints import load_oracle, make_model

BOUND = 0.02
"""On the RMS of the difference, relative to the RMS of the logits: bf16 rounding alone gives 0.01."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels stay in the user's cache."""
    monkeypatch.setattr(cached_file, "cache_directory", lambda: tmp_path)


def oracle(model_dir: Path, mode: str) -> Any:
    """The transformers model with our quantised weights as floats."""
    config, model = read_decoder_config(model_dir), load_oracle(model_dir)
    with open_quantized(model_dir, config, QUANTIZATIONS[mode]) as weights, torch.inference_mode():
        named = dict(model.named_parameters())
        for name, specs in linear_specs(config).items():
            linear: Tensor = weights._linear(name).dequantize()
            if "expert_" in name:
                experts = model.model.layers[int(name.split(".")[1])].mlp.experts
                target = experts.gate_up_proj if name.endswith("gate_up") else experts.down_proj
                target.copy_(linear.view(target.shape))
                continue
            for spec, part in zip(specs, linear.split([spec.shape[0] for spec in specs]), strict=True):
                named[spec.name].copy_(part)
    return model


@pytest.mark.parametrize(
    ("architecture", "mode", "is_deterministic"),
    [("qwen3", "int8", False), ("llama3", "int4", False), ("qwen2-moe", "int8", True), ("qwen3", "fp8", False)],
)
def test_logits_are_those_of_the_same_weights_in_transformers(
    architecture: str, mode: str, is_deterministic: bool
) -> None:
    """Compares a prompt of more rows than our kernel multiplies, chunks, and captured steps. qwen3's embedding is
    lm_head."""
    options = PassOptions(dtype="bf16", max_running=3, max_batch_tokens=128, quantize=mode)
    options = replace(options, deterministic=is_deterministic)
    made = EmulatedCudaPass.load(checkpoint(architecture), options)
    assert made.spec == EmulatedCudaPass.describe(checkpoint(architecture), options)
    assert made.spec.quantization == mode
    exact = oracle(checkpoint(architecture), mode)
    driver = Driver(made, num_pages=32, page_size=16, kv_dtype="fp32")
    logits = dict(enumerate(run_prompts(driver, prompts((80, 5, 33)))))
    for _ in range(2):
        for row in driver.rows:
            tokens = row.tokens[: row.computed]
            with torch.inference_mode():
                expected = exact(torch.tensor([tokens])).logits[0, -1].numpy()
            assert relative_error(logits[row.slot], expected) < BOUND
            assert relative_error(oracle_logits(architecture, tokens)[-1], expected) > 0.2 * BOUND
        logits = driver.step([(row, 1) for row in driver.rows])


def test_a_mode_that_does_not_fit_is_refused_before_weights_are_read() -> None:
    options = PassOptions(device="cuda:0", dtype="fp32", quantize="int8")
    with pytest.raises(
        StartupError, match="--quantize is int8; on a GPU it needs 16-bit activations: use --dtype bf16"
    ):
        DecoderPass.describe(checkpoint("llama3"), options)
    with pytest.raises(StartupError, match="has 64 inputs, not a multiple of 128: use int8 or int4"):
        DecoderPass.describe(checkpoint("llama3"), replace(options, dtype="bf16", quantize="int4-128"))


@pytest.mark.parametrize(("block", "architecture"), [((128, 128), "llama-bias"), (None, "qwen3-moe")])
def test_a_checkpoint_of_8_bit_floats_stays_packed(
    block: tuple[int, int] | None, architecture: str, tmp_path: Path
) -> None:
    """The oracle is the CPU's pass in fp32, which dequantises."""
    stored = {"quant_method": "fp8", "fmt": "e4m3"} | ({} if block is None else {"weight_block_size": list(block)})
    plain: tuple[str, ...] = ("lm_head", "embed_tokens")
    settings: dict[str, Any] = {"head_dim": 64}
    if architecture == "qwen3-moe":
        plain, settings = (*plain, "mlp.gate"), settings | {"mlp_only_layers": []}
    made = write_checkpoint(tmp_path, stored, fp8(block), plain=plain, architecture=architecture, **settings)
    options = PassOptions(dtype="bf16", max_running=1, max_batch_tokens=32)
    forward_pass = EmulatedCudaPass.load(made.path, options)
    assert forward_pass.spec == EmulatedCudaPass.describe(made.path, options)
    assert forward_pass.spec.weight_bytes < 0.85 * CpuDecoderPass.describe(made.path, options).weight_bytes
    exact = CpuDecoderPass.load(made.path, replace(options, dtype="fp32"))
    logits = [
        run_prompts(Driver(each, num_pages=4, page_size=16, kv_dtype="fp32"), prompts((20,)))[0]
        for each in (forward_pass, exact)
    ]
    assert relative_error(*logits) < BOUND


def test_a_gguf_file_of_many_types_stays_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle has the weights that the gguf package dequantises. Queries, keys and values are one linear here."""
    monkeypatch.setattr(cached_directories, "cache_directory", lambda: tmp_path)
    model = make_model("qwen3", **SIZES, head_dim=64)
    file = from_model("qwen3", model, mixed, byte_level_vocabulary(SIZES["vocab_size"]))
    model.load_state_dict(file.exact, strict=False)
    model_dir = resolve_model(str(file.write(tmp_path / "model.gguf")))
    options = PassOptions(dtype="bf16", max_running=1, max_batch_tokens=128)
    made = EmulatedCudaPass.load(model_dir, options)
    assert made.spec == EmulatedCudaPass.describe(model_dir, options)
    assert made.spec.weight_bytes < 0.6 * 2 * model.num_parameters()
    driver = Driver(made, num_pages=8, page_size=16, kv_dtype="fp32")
    logits = run_prompts(driver, prompts((80,)))[0]
    for _ in range(2):
        (row,) = driver.rows
        with torch.inference_mode():
            expected = model(torch.tensor([row.tokens[: row.computed]])).logits[0, -1].numpy()
        assert relative_error(logits, expected) < BOUND
        logits = driver.step([(row, 1)])[row.slot]


INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"all": {"targets": ["Linear"], "weights": INT8, "input_activations": INT8 | {"dynamic": True}}},
    "ignore": ["lm_head"],
}
STATIC_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}


LONG = PassOptions(dtype="bf16", max_running=2, max_batch_tokens=264)


def check_long_prompt(model_dir: Path, reference: Any, form: str, quantize: str, others: list[PassOptions]) -> None:
    """The logits' error is about that of transformers with linears that round their inputs. It is not the same error:
    where a number lies near the middle of two steps, bf16 decides. With `others`, nothing is rounded."""
    (prompt,) = prompts((260,))
    with torch.inference_mode():
        exact = reference(torch.tensor([prompt])).logits[0, -1].numpy()
        for name, module in reference.model.layers.named_modules():
            if name.endswith("_proj") and (name.startswith("0.") or name[-6:] in ("q_proj", "k_proj", "v_proj")):
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0], form).float(),))
        rounding_error = relative_error(reference(torch.tensor([prompt])).logits[0, -1].numpy(), exact)

    def logits(options: PassOptions) -> tuple[Any, list[str]]:
        made_pass = EmulatedCudaPass.load(model_dir, options)
        assert made_pass.spec == EmulatedCudaPass.describe(model_dir, options)
        driver = Driver(made_pass, num_pages=20, page_size=16, kv_dtype="fp32")
        first = len(made_pass.device.launcher.launched)
        found = run_prompts(driver, [prompt])[0]
        return found, made_pass.device.launcher.launched[first:]

    found, launched = logits(replace(LONG, quantize=quantize))
    assert launched.count("round_rows") == 4 + 1, "the last linears see the last token alone"
    assert 0.7 * rounding_error < relative_error(found, exact) < 1.4 * rounding_error
    for kept in others:
        found, launched = logits(kept)
        assert "round_rows" not in launched
        assert relative_error(found, exact) < 0.5 * rounding_error


@pytest.mark.parametrize(
    ("form", "stored", "quantize"), [("int8", W8A8, int8), ("fp8", STATIC_FP8, fp8(None, "weight_scale"))]
)
def test_a_long_prompt_has_activations_of_8_bits_where_the_checkpoint_declares_them(
    form: str, stored: dict[str, Any], quantize: Any, tmp_path: Path
) -> None:
    made = write_checkpoint(tmp_path / "stored", stored, quantize, head_dim=64)
    reference = load_reference(made, tmp_path / "plain")
    others = [replace(LONG, deterministic=True), replace(LONG, quantize="int8")]
    check_long_prompt(made.path, reference, form, LONG.quantize, others)


def test_a_long_prompt_has_activations_of_8_bits_with_quantize_fp8() -> None:
    """torch._scaled_mm multiplies. A prompt of at most 256 tokens keeps 16 bits, as the tests above show."""
    model_dir = checkpoint("llama3")
    others = [replace(LONG, quantize="fp8", deterministic=True)]
    check_long_prompt(model_dir, oracle(model_dir, "fp8"), "fp8", "fp8", others)
