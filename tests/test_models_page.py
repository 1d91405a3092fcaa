"""The tables of docs/models.md are made here, from what the code supports.

PENSTOCK_WRITE_DOCS=1 pytest tests/test_models_page.py
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.backend.checkpoint.config.architectures.names import SUPPORTED_ARCHITECTURES
from penstock.backend.checkpoint.config_json import parse_decoder_config
from penstock.backend.checkpoint.encoders import families as encoder_families
from penstock.backend.checkpoint.encoders.read_config import parse_encoder
from penstock.backend.passes.cpu.kernel_limits import supports_native_ops
from penstock.backend.passes.decoder.cuda_pass.model_parts import unsupported_variation
from penstock.backend.passes.encoder.cuda_loading import unsupported_on_gpu
from penstock.backend.passes.encoder.native_ops import unsupported_by_kernels
from tests.backend.passes.transformers_model import families as transformers_families
from tests.checkpoints import make_config
from tests.encoder_checkpoints import PRESETS as ENCODER_PRESETS
from tests.encoder_checkpoints import EncoderPreset, encoder_config
from tests.presets import PRESETS

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.encoders.encoder_config import EncoderConfig

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MODELS = {
    "LlamaForCausalLM": "Llama 2, 3, 3.1, 3.2, 3.3; SmolLM 1, 2; many fine-tunes",
    "MistralForCausalLM": "Mistral 7B, Nemo, Small 24B (text)",
    "MinistralForCausalLM": "Ministral 8B",
    "Ministral3ForCausalLM": "Ministral 3",
    "Qwen2ForCausalLM": "Qwen 2, 2.5; QwQ; DeepSeek-R1 distillations",
    "Qwen3ForCausalLM": "Qwen3 0.6B to 32B",
    "Qwen3MoeForCausalLM": "Qwen3 30B-A3B, 235B-A22B; Qwen3-Coder",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2 57B-A14B",
    "Qwen3NextForCausalLM": "Qwen3-Next 80B-A3B",
    "Qwen3_5ForCausalLM": "Qwen3.5 and 3.6, dense",
    "Qwen3_5MoeForCausalLM": "Qwen3.5 and 3.6 with experts",
    "MixtralForCausalLM": "Mixtral 8x7B, 8x22B",
    "GptOssForCausalLM": "gpt-oss 20B, 120B",
    "SmolLM3ForCausalLM": "SmolLM3",
    "Phi3ForCausalLM": "Phi-3, 3.5 mini; Phi-4, Phi-4-mini",
    "GemmaForCausalLM": "Gemma",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 270M, 1B (text)",
    "Gemma3nForCausalLM": "Gemma 3n (text)",
    "Gemma4ForCausalLM": "Gemma 4 (text)",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "GraniteForCausalLM": "Granite 3, 3.1, 3.2, 3.3",
    "GlmForCausalLM": "GLM-4 9B",
    "Glm4ForCausalLM": "GLM-4-0414",
    "CohereForCausalLM": "Command R",
    "Cohere2ForCausalLM": "Command R7B, Command A",
    "Starcoder2ForCausalLM": "StarCoder2",
    "Gemma3ForConditionalGeneration": "Gemma 3 4B, 12B, 27B (pictures)",
    "Gemma3nForConditionalGeneration": "Gemma 3n E2B, E4B (text only)",
    "Gemma4ForConditionalGeneration": "Gemma 4 E2B, E4B, 26B-A4B, 31B (pictures)",
    "Idefics3ForConditionalGeneration": "Idefics 3; SmolVLM (pictures)",
    "SmolVLMForConditionalGeneration": "SmolVLM 2 (pictures)",
    "InternVLForConditionalGeneration": "InternVL 3 (pictures)",
    "LlavaForConditionalGeneration": "LLaVA 1.5; Pixtral 12B (pictures)",
    "LlavaOnevisionForConditionalGeneration": "LLaVA-OneVision (pictures)",
    "Mistral3ForConditionalGeneration": "Mistral Small 3.1, 3.2 24B; Ministral 3 3B, 8B, 14B (pictures)",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL (pictures)",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL (pictures)",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5 0.8B to 27B, Qwen3.6 27B (pictures)",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5 35B-A3B to 397B-A17B, Qwen3.6 35B-A3B (pictures)",
    "Qwen3VLForConditionalGeneration": "Qwen3-VL (pictures)",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL 30B-A3B, 235B-A22B (pictures)",
}


def decoder_rows() -> list[str]:
    rows = ["| architecture | models | windows |", "|---|---|---|"]
    for architecture in SUPPORTED_ARCHITECTURES:
        configs = [tiny(name) for name, preset in PRESETS.items() if preset.model == architecture]
        assert configs, f"tests/presets.py has no preset of {architecture}"
        is_native = all(map(supports_native_ops, configs))
        windows = {window_kinds(config) for config in configs} - {""}
        exceptions = without_kernels(is_native, on_gpu({unsupported_variation(config) for config in configs}))
        cells = (f"`{architecture}`", MODELS[architecture] + exceptions, " or ".join(sorted(windows)))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def without_kernels(is_native: bool, on_gpu: str) -> str:
    """What a row adds where not both devices run kernels."""
    devices = {"CPU": "kernels" if is_native else "torch", "GPU": on_gpu}
    return "".join(f"; {device}: {runs}" for device, runs in devices.items() if runs != "kernels")


def window_kinds(config: DecoderConfig) -> str:
    windows = config.layer_window_tokens
    return "" if not any(windows) else "all" if all(windows) else "some"


ENCODERS = {
    "Bert": "BERT, MiniLM, BGE 1.5, GTE, E5, Arctic-Embed, MS MARCO cross-encoders, SPLADE",
    "DistilBert": "DistilBERT, TAS-B, multilingual DistilUSE",
    "Roberta": "RoBERTa, all-distilroberta",
    "XLMRoberta": "XLM-R, BGE-M3, multilingual E5, BGE rerankers",
    "Camembert": "CamemBERT",
    "MPNet": "all-mpnet-base",
    "ModernBert": "ModernBERT, GTE-ModernBERT, Granite Embedding R2",
    "NomicBert": "nomic-embed-text v1, v1.5",
    "New": "GTE 1.5 and multilingual, with the hub's names",
    "Gte": "the same, with those of transformers",
    "DebertaV2": "DeBERTa-v3, mxbai-rerank v1, zero-shot classifiers; DeBERTa-v2 without convolution",
}


def encoder_rows() -> list[str]:
    rows = ["| architectures | models |", "|---|---|"]
    assert list(ENCODERS) == list(encoder_families.FAMILIES)
    for name, family in encoder_families.FAMILIES.items():
        presets = [preset for preset in ENCODER_PRESETS.values() if preset.family in (name, _SAME_MODEL.get(name))]
        assert presets, f"tests/encoder_checkpoints.py has no preset of {name}"
        kernels = {unsupported_by_kernels(tiny_encoder(preset)) for preset in presets}
        with_kernels = (replace(tiny_encoder(preset), num_heads=2) for preset in presets)  # their heads are tiny too
        missing = {unsupported_on_gpu(config) for config in with_kernels}
        on_gpu = "kernels" if None in missing else f"no: {' and '.join(sorted(filter(None, missing)))}"
        exceptions = without_kernels(None in kernels, on_gpu) + ("" if family.words else "; no ForMaskedLM")
        rows.append(f"| `{name}…` | {ENCODERS[name]}{exceptions} |")
    return rows


def tiny_encoder(preset: EncoderPreset) -> EncoderConfig:
    values = json.loads(encoder_config(preset).to_json_string())
    config, _ = parse_encoder(values, preset.family, "Model")
    return config


def on_gpu(missing: set[str | None]) -> str:
    """missing: what each preset of an architecture needs and the kernels lack; None for a preset that runs."""
    names = " and ".join(sorted(filter(None, missing)))
    if None not in missing:
        return f"no: {names}"
    return f"kernels; not with {names}" if names else "kernels"


def tiny(preset: str) -> DecoderConfig:
    values = json.loads(make_config(preset).to_json_string())
    return parse_decoder_config(values | {"architectures": [PRESETS[preset].model]})


def transformers_rows() -> list[str]:
    served = [f"{name}ForCausalLM" for name, _ in transformers_families.FAMILIES.values()]
    answers = {"yes": [name for name in served if name not in SUPPORTED_ARCHITECTURES]}
    answers["yes; the built-in decoder too"] = [name for name in served if name in SUPPORTED_ARCHITECTURES]
    for name, _, reason in transformers_families.REFUSED.values():
        answers.setdefault(f"no: {reason}", []).append(f"{name}ForCausalLM")
    rows = [f"| {answer} | {', '.join(f'`{name}`' for name in names)} |" for answer, names in answers.items()]
    return ["| served | architectures |", "|---|---|", *rows]


TABLES = {"decoder": decoder_rows, "encoder": encoder_rows, "transformers": transformers_rows}
_SAME_MODEL = {"New": "Gte"}


@pytest.mark.parametrize("name", TABLES)
def test_table_says_what_the_code_does(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    block = re.compile(rf"(<!-- {name}: made by tests/test_models_page.py -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)
    table = "\n".join(TABLES[name]())
    found = block.search(text)
    assert found is not None
    if os.environ.get("PENSTOCK_WRITE_DOCS"):
        PAGE.write_text(block.sub(lambda match: match[1] + table + match[3], text), encoding="utf-8")
        return
    assert found[2] == table, "run the command at the top of this file"


def test_every_served_architecture_has_a_row_of_names() -> None:
    assert list(MODELS) == list(SUPPORTED_ARCHITECTURES)
