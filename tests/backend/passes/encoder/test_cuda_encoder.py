"""Encoders on the emulated GPU against transformers, alone and in company, and what a GPU refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import DeviceLost, PassOptions
from penstock.backend.passes.encoder import forward_pass as encoder_pass
from penstock.backend.passes.encoder.forward_pass import EncoderPass
from tests.backend.passes.cuda.emulated_device import EmulatedDevice
from tests.backend.passes.encoder.driver import cosine, make_batch, random_rows, run_rows
from tests.backend.passes.encoder.test_encoder_pass import HEADS, POOLED, expected
from tests.encoder_checkpoints import PRESETS, make_encoder, make_sentence_encoder

if TYPE_CHECKING:
    from pathlib import Path

PLACES = {"num_attention_heads": 2}
"""Heads of 32: the narrowest for which there are kernels."""
FAMILIES = ("bert", "distilbert", "xlm-roberta", "mpnet", "modernbert", "nomic", "gte")
MAX_TOKENS = 600


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    """The device that the pass opens as a GPU."""
    device = EmulatedDevice()
    monkeypatch.setattr(encoder_pass, "open_gpu", lambda _: device)
    return device


def make(preset: str, suffix: str, path: Path, **settings: Any) -> Any:
    heads = {"n_heads": 2} if PRESETS[preset].family == "DistilBert" else PLACES
    return make_encoder(preset, suffix, path, **heads, **settings)


def load(path: Path, dtype: str = "fp32", quantize: str = "none") -> EncoderPass:
    options = PassOptions(device="cuda:0", dtype=dtype, quantize=quantize, max_batch_tokens=MAX_TOKENS)
    assert EncoderPass.describe(path, options).pooled
    return EncoderPass.load(path, options)


@pytest.mark.parametrize("preset", FAMILIES)
@pytest.mark.usefixtures("device")
def test_a_family_gives_what_transformers_gives(preset: str, tmp_path: Path) -> None:
    model = make(preset, "Model", tmp_path)
    rows = random_rows((1, 17, 150, 40))
    wanted = [expected(model, row, "token_embed") for row in rows]
    for dtype, limit in (("fp32", 0.99999), ("bf16", 0.999)):
        found = run_rows(load(tmp_path, dtype), rows, "token_embed")
        assert min(cosine(a, b) for a, b in zip(wanted, found, strict=True)) > limit


@pytest.mark.parametrize("preset", ["bert", "modernbert"])
@pytest.mark.parametrize("kind", ["classify", "token_classify", "sparse"])
@pytest.mark.usefixtures("device")
def test_a_head_gives_what_transformers_gives(preset: str, kind: str, tmp_path: Path) -> None:
    model = make(preset, HEADS[kind], tmp_path)
    rows = random_rows((1, 17, 150))
    forward_pass = load(tmp_path)
    for row, result in zip(rows, run_rows(forward_pass, rows, kind), strict=True):
        assert result.shape[-1] == forward_pass.spec.pooled[kind]
        assert cosine(expected(model, row, kind), result) > 0.99999


@pytest.mark.parametrize("mode", POOLED)
@pytest.mark.usefixtures("device")
def test_a_pooling_mode_is_that_of_sentence_transformers(mode: str, tmp_path: Path) -> None:
    model = make_sentence_encoder("bert", tmp_path, {mode: True}, **PLACES)
    rows = random_rows((1, 40, 17))
    forward_pass = load(tmp_path)
    together = run_rows(forward_pass, rows, ["embed", "token_embed", "embed"])
    for row, result in ((rows[0], together[0]), (rows[2], together[2])):
        assert cosine(POOLED[mode](expected(model, row, "embed")), result) > 0.99999
        np.testing.assert_array_equal(run_rows(forward_pass, [row], "embed")[0], result)


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("preset", ["bert", "mpnet", "modernbert"])
@pytest.mark.usefixtures("device", "choosy_library")
def test_a_row_has_the_same_bits_in_any_company(preset: str, quantize: str, tmp_path: Path) -> None:
    make(preset, "ForMaskedLM", tmp_path)
    forward_pass = load(tmp_path, "bf16", quantize)
    rows = random_rows((1, 33, 150, 150, 150, 64, 7))
    kinds = ["embed", "token_embed", "sparse", "embed", "token_embed", "sparse", "embed"]
    together = run_rows(forward_pass, rows, kinds)
    behind_others = run_rows(forward_pass, rows[::-1], kinds[::-1])[::-1]
    for row, kind, result, other in zip(rows, kinds, together, behind_others, strict=True):
        np.testing.assert_array_equal(run_rows(forward_pass, [row], kind)[0], result)
        np.testing.assert_array_equal(other, result)


@pytest.mark.usefixtures("device")
def test_int8_stays_close(tmp_path: Path) -> None:
    model = make("bert", "Model", tmp_path)
    rows = random_rows((17, 40))
    for row, result in zip(rows, run_rows(load(tmp_path, "bf16", "int8"), rows, "token_embed"), strict=True):
        assert cosine(expected(model, row, "token_embed"), result) > 0.99


@pytest.mark.usefixtures("device")
def test_second_texts_have_token_types_of_their_own(tmp_path: Path) -> None:
    model = make("bert", "ForSequenceClassification", tmp_path, num_labels=1)
    rows, seconds = random_rows((30, 12)), [11, 0]
    for row, second, result in zip(rows, seconds, run_rows(load(tmp_path), rows, "classify", seconds), strict=True):
        np.testing.assert_allclose(result, expected(model, row, "classify", second), rtol=1e-4, atol=1e-5)


def test_a_broken_device_is_named_and_a_failed_step_is_not_the_end(device: EmulatedDevice, tmp_path: Path) -> None:
    make("bert", "Model", tmp_path)
    forward_pass = load(tmp_path)
    with pytest.raises(KeyError) as failed:
        run_rows(forward_pass, random_rows((3,)), "classify")
    assert "a step of 1 rows and 3 tokens" in failed.value.__notes__[0]
    assert len(run_rows(forward_pass, random_rows((3,)), "embed")) == 1
    batch = make_batch(random_rows((3,)), ["embed"], [0])
    handle = forward_pass.forward(batch)
    device.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceLost, match="waiting for 1 blocks of vectors: CUDA error: an illegal memory access"):
        forward_pass.sample(handle, batch).wait()


def test_the_plan_covers_what_a_step_allocates(tmp_path: Path) -> None:
    make("modernbert", "ForMaskedLM", tmp_path)
    small, large = (
        EncoderPass.describe(tmp_path, PassOptions(device="cuda:0", max_batch_tokens=count)) for count in (512, 4096)
    )
    assert small.runs_ahead
    assert large.workspace_bytes > small.workspace_bytes > 512 * 64 * 20


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"num_attention_heads": 16}, {}, "head_dim is 4; it must be a multiple of 8, at most 128; use --gpu none"),
        (PLACES | {"intermediate_size": 84}, {}, "intermediate_size is 84; it must be a multiple of 8"),
        (PLACES, {"dtype": "fp16"}, "dtype is 'fp16'; it must be auto, bf16 or fp32"),
        (PLACES, {"dtype": "fp32", "quantize": "int8"}, "--quantize is int8; on a GPU it needs --dtype bf16, not fp32"),
        (PLACES, {"quantize": "int4"}, "--quantize is int4; of an encoder it must be none or int8"),
        (PLACES, {"max_running": 40_000}, "a step of 40000 inputs and 512 tokens is too large"),
    ],
)
def test_what_a_gpu_lacks_is_refused_by_name(
    settings: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_encoder("bert", "Model", tmp_path, **settings)
    with pytest.raises(StartupError, match=message):
        EncoderPass.describe(tmp_path, PassOptions(device="cuda:0", **options))


def test_scores_by_relative_position_are_refused_by_name(tmp_path: Path) -> None:
    make("deberta-v2", "Model", tmp_path)
    with pytest.raises(StartupError, match="there are no kernels for scores by relative position; use --gpu none"):
        EncoderPass.describe(tmp_path, PassOptions(device="cuda:0"))
