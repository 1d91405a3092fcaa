"""Checks of a pass at start: vocabulary and first step, what they refuse, and that they leave no trace."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import (
    FROM_SLOT,
    IBatchedForwardPass,
    PassOptions,
    PassSpec,
    SamplingParams,
    SlotInit,
    StepBatch,
    StepOutput,
    TokenMasks,
)
from penstock.backend.model_names import DEMO_MODEL_DIR
from penstock.backend.options import BackendOptions
from penstock.backend.passes.fake import FakePass
from penstock.backend.start.pass_checks import check_first_step, check_groups, check_vocabulary
from penstock.backend.start.startup import describe_pass, pass_options
from tests.fake_encoder import FakeEncoder, PoolingFakePass
from tests.fake_passes import GroupedFakePass
from tests.passes import WideFakePass

OPTIONS = PassOptions(max_running=1)
SPEC = FakePass.describe(None, OPTIONS)
PAGE = 16


def open_pass(pass_class: type[FakePass] = FakePass) -> FakePass:
    """A pass with one slot and one page."""
    forward_pass = pass_class.load(None, OPTIONS)
    forward_pass.create_cache(1, PAGE, "fp32")
    return forward_pass


class PassWithoutHostLogits:
    """Has only the methods that every pass must have. Its handle is the numpy array itself."""

    def __init__(self) -> None:
        self._inner = open_pass()
        self.spec = self._inner.spec

    def forward(self, batch: StepBatch) -> Any:
        return self._inner.forward(batch)

    def sample(self, logits: Any, batch: StepBatch, masks: TokenMasks | None = None) -> StepOutput:
        return self._inner.sample(logits, batch, masks)


class WidePassWithoutHostLogits(PassWithoutHostLogits):
    def forward(self, batch: StepBatch) -> Any:
        return np.pad(super().forward(batch), ((0, 0), (0, 1)))


class OpaquePass(PassWithoutHostLogits):
    """Its handle is an object of its own."""

    def forward(self, batch: StepBatch) -> Any:
        return {"logits": super().forward(batch)}

    def sample(self, logits: Any, batch: StepBatch, masks: TokenMasks | None = None) -> StepOutput:
        return super().sample(logits["logits"], batch, masks)


class NanPass(FakePass):
    def forward(self, batch: StepBatch) -> Any:
        return np.full_like(super().forward(batch), np.nan)


class NanEncoder(FakeEncoder):
    def forward(self, batch: StepBatch) -> Any:
        return tuple(values * np.float32(np.nan) for values in super().forward(batch))


class TwiceSamplingPass(FakePass):
    def sample(self, logits: Any, batch: StepBatch, masks: TokenMasks | None = None) -> StepOutput:
        output = super().sample(logits, batch, masks)
        return StepOutput(np.repeat(output.token_ids, 2))


def check(forward_pass: Any, spec: PassSpec = SPEC) -> None:
    checked: IBatchedForwardPass = forward_pass
    check_first_step(checked, spec)


def test_describe_that_disagrees_with_the_loaded_pass_is_refused_with_both_sizes() -> None:
    with pytest.raises(StartupError, match=r"vocab_size of 4096; its describe\(\) said 4095"):
        check(open_pass(), replace(SPEC, vocab_size=4095))


def test_windows_that_disagree_with_the_loaded_pass_are_refused_with_both() -> None:
    with pytest.raises(StartupError, match=r"has kv_windows \(None,\); its describe\(\) said \(None, 4\)"):
        check(open_pass(), replace(SPEC, kv_windows=(None, 4)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_windows": ()}, r"kv_windows \(\): make them one or more"),
        ({"kv_windows": (None, 0)}, r"kv_windows \(None, 0\): make .* of 1 token or more"),
        ({"kv_windows": (None, 9, 9)}, "has 8 kv_bytes_per_token in fp32 for 3 groups of layers"),
    ],
)
def test_groups_without_windows_or_equal_parts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        check_groups(replace(SPEC, **changes))


def test_pass_with_several_groups_of_layers_is_accepted() -> None:
    grouped = GroupedFakePass(96, 1)
    grouped.create_cache(3, PAGE, "fp32")
    check_groups(grouped.spec)
    check_first_step(grouped, grouped.spec)


@pytest.mark.parametrize(
    ("forward_pass", "message"),
    [
        (open_pass(WideFakePass), r"logits of shape \[1, 4097\].*\[1, 4096\]"),
        (WidePassWithoutHostLogits(), r"logits of shape \[1, 4097\].*\[1, 4096\]"),
        (open_pass(NanPass), "after one token the row of logits of the forward pass has NaN"),
        (open_pass(TwiceSamplingPass), r"token ids of shape \[2\] for one row; expected \[1\]"),
    ],
)
def test_output_of_the_wrong_shape_or_without_numbers_is_refused(forward_pass: Any, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        check(forward_pass)


@pytest.mark.parametrize("forward_pass", [PassWithoutHostLogits(), OpaquePass()])
def test_pass_without_host_logits_is_accepted(forward_pass: Any) -> None:
    assert not hasattr(forward_pass, "host_logits")
    check(forward_pass)


def test_first_step_leaves_no_trace_for_the_next_owner_of_its_slot_and_page() -> None:
    """The sequence has every setting that a slot keeps: penalties, bias, random numbers and log probabilities."""
    checked, fresh = open_pass(), open_pass()
    check(checked)
    expected, tokens = _generate(fresh), _generate(checked)
    assert len(set(expected)) > 1
    assert tokens == expected


def _generate(forward_pass: FakePass) -> list[tuple[int, float]]:
    """Five sampled tokens with their log probabilities, in slot 0 and page 0. The prompt begins with token 0."""
    prompt = np.array([0, 7, 9], np.int32)
    params = SamplingParams(
        temperature=3.0,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((0, 4.0),),
        seed=11,
        num_logprobs=2,
    )
    found = []
    input_ids, context, inits = prompt, 0, (SlotInit(0, params, prompt, len(prompt)),)
    for _ in range(5):
        batch = StepBatch(
            input_ids=input_ids,
            query_starts=np.array([0, len(input_ids)], np.int32),
            context_lens=np.array([context], np.int32),
            page_table=np.zeros((1, 1), np.int32),
            slots=np.zeros(1, np.int32),
            logit_rows=np.zeros(1, np.int32),
            slot_inits=inits,
        )
        output = forward_pass.sample(forward_pass.forward(batch), batch).wait()
        assert output.logprobs is not None
        found.append((int(output.token_ids[0]), float(output.logprobs.chosen[0])))
        context += len(input_ids)
        input_ids, inits = np.array([FROM_SLOT], np.int32), ()
    return found


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A directory with a tokenizer of three token ids, and one that was added to it: 3."""
    tokenizer = Tokenizer(WordLevel(vocab={"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_vocabulary_smaller_than_the_tokenizers_is_refused(model_dir: Path) -> None:
    with pytest.raises(StartupError, match=r"vocab_size of 2; .* token ids up to 2: .* at least 3"):
        check_vocabulary(replace(SPEC, vocab_size=2), model_dir)


@pytest.mark.parametrize(("vocab_size", "num_warnings"), [(3, 1), (4, 0), (64, 0)])
def test_added_token_without_logits_is_a_warning(
    vocab_size: int, num_warnings: int, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "penstock.backend"):
        check_vocabulary(replace(SPEC, vocab_size=vocab_size), model_dir)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * num_warnings
    assert all("ids up to 3, the model's logits end at 2" in message for message in caplog.messages)


class UncutEncoder(FakeEncoder):
    def forward(self, batch: StepBatch) -> Any:
        return tuple(np.append(values, values) for values in super().forward(batch))


def with_spec(**changes: Any) -> FakeEncoder:
    encoder = FakeEncoder(96)
    encoder.spec = replace(encoder.spec, **changes)
    return encoder


def test_passes_that_pool_are_accepted() -> None:
    check_first_step(FakeEncoder(96), FakeEncoder(96).spec)  # type: ignore[arg-type]
    decoder = PoolingFakePass(96, 1)
    decoder.create_cache(1, PAGE, "fp32")
    check_first_step(decoder, decoder.spec)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (
            UncutEncoder(96),
            r'shapes \[\[16\]\] for one row of one token of kind "embed" instead of \[\[8\]\]',
        ),
        (NanEncoder(96), 'a vector of kind "embed" of the forward pass has NaN'),
        (with_spec(pooled={}), "pools nothing and does not generate"),
        (with_spec(pooled={"colour": 3}), "pools colour"),
        (with_spec(generates=True), "generates without a KV cache"),
        (with_spec(kv_bytes_per_token={"fp32": 8}), "cannot give a vector a token"),
    ],
)
def test_pass_that_pools_against_its_spec_is_refused(encoder: Any, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        check_first_step(encoder, encoder.spec)


def test_loaded_pass_must_pool_what_was_described() -> None:
    with pytest.raises(StartupError, match="describe"):
        check_first_step(FakeEncoder(96), with_spec(pooled={"embed": 9}).spec)  # type: ignore[arg-type]


class FakeWholePictures(FakePass):
    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        return replace(super().describe(model_dir, options), whole_picture_tokens=280)


def test_a_step_holds_the_largest_picture_that_is_computed_whole() -> None:
    options = BackendOptions(max_running=16)
    _, settings = describe_pass(options, "", FakeWholePictures, DEMO_MODEL_DIR, pass_options(options))
    assert settings.max_batch_tokens == 296
    options = BackendOptions(max_running=16, max_batch_tokens=200)
    with pytest.raises(StartupError, match="--max-batch-tokens is 200; this model needs at least 296"):
        describe_pass(options, "", FakeWholePictures, DEMO_MODEL_DIR, pass_options(options))


def test_no_pass_has_a_state_and_whole_pictures() -> None:
    with pytest.raises(StartupError, match="whole_picture_tokens is 280; a pass with state_bytes_per_sequence, 8,"):
        with_spec(whole_picture_tokens=280, state_bytes_per_sequence=8)
