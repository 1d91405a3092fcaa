"""--draft-model: its part of the memory, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions, PassSpec
from penstock.backend.kv_cache.budget.kv_plan import KvPlan
from penstock.backend.kv_cache.budget.memory import MemoryInfo
from penstock.backend.model_names import DEMO_MODEL_DIR
from penstock.backend.options import BackendOptions
from penstock.backend.passes.fake import FakePass
from penstock.backend.start.draft_model import DraftChoice, find_draft, plan_with_draft
from penstock.backend.start.paging import uses_drafts
from penstock.backend.start.startup import describe_pass, pass_options, plan_memory

if TYPE_CHECKING:
    from pathlib import Path

BUDGET = 640_000


def _options(**options: Any) -> BackendOptions:
    given = {"forward_pass": "fake", "gpu": "none", "kv_budget": BUDGET, "draft_model": str(DEMO_MODEL_DIR)}
    return BackendOptions(**given | options)


def _describe(options: BackendOptions) -> tuple[PassSpec, PassOptions]:
    return describe_pass(options, "fake", FakePass, DEMO_MODEL_DIR, pass_options(options))


def _choose(options: BackendOptions) -> tuple[DraftChoice, KvPlan]:
    plan, draft = plan_with_draft(options, *_describe(options), MemoryInfo(10**9, 10**9, "memory"))
    assert draft is not None
    assert isinstance(plan, KvPlan)
    return draft, plan


def test_budget_holds_the_pages_of_both_models() -> None:
    options = _options(speculation="draft")
    draft, plan = _choose(options)
    spec, settings = _describe(options)
    alone = plan_memory(options, spec, settings, MemoryInfo(10**9, 10**9, "memory"))
    page_bytes = 8 * 32
    assert isinstance(alone, KvPlan)
    assert plan.num_pages == alone.num_pages // 2 - 2 == BUDGET // (2 * page_bytes) - 2
    assert BUDGET - 2 * page_bytes < plan.num_bytes + plan.workspace_bytes - alone.workspace_bytes <= BUDGET
    assert plan.budget == alone.budget
    draft.load(FakePass(spec.vocab_size, 4), DEMO_MODEL_DIR, plan)
    assert draft.model is not None
    draft.model.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_model": None, "speculation": "draft"}, ("--speculation is draft", "--draft-model")),
        ({"speculation": "ngram"}, ("--draft-model", "--speculation is ngram")),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], words: tuple[str, ...]) -> None:
    given = _options(**options)
    spec, settings = _describe(given)
    with pytest.raises(StartupError) as caught:
        find_draft(given, settings, spec)
    assert all(word in str(caught.value) for word in words)


def test_models_with_a_state_or_windows_take_no_draft_model() -> None:
    options = _options()
    spec, settings = _describe(options)
    for refused in (replace(spec, state_bytes_per_sequence=8), replace(spec, kv_windows=(None, 128))):
        with pytest.raises(StartupError, match="attend to the whole text"):
            find_draft(options, settings, refused)
    with pytest.raises(StartupError, match="has KV dtypes fp32, the model bf16"):
        _choose(options)[0].added_to(replace(spec, kv_bytes_per_token={"bf16": 2}))


def test_draft_model_with_another_tokenizer_and_target_that_verifies_nothing_are_refused(tmp_path: Path) -> None:
    other = shutil.copytree(DEMO_MODEL_DIR, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    first = next(iter(tokenizer["model"]["vocab"]))
    tokenizer["model"]["vocab"][f"{first}{first}"] = tokenizer["model"]["vocab"].pop(first)
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    draft, plan = _choose(_options(draft_model=str(other)))
    target = FakePass(draft.spec.vocab_size, 4)
    with pytest.raises(StartupError, match=r"has another tokenizer: token .* use a model of the same family"):
        draft.load(target, DEMO_MODEL_DIR, plan)
    target.spec = replace(target.spec, verifies_drafts=False)
    with pytest.raises(StartupError, match="FakePass cannot verify guessed tokens"):
        draft.load(target, DEMO_MODEL_DIR, plan)


def test_tokens_are_guessed_by_default_only_where_that_changes_none() -> None:
    target = FakePass(97, 4)
    found = []
    for rounds_drafts in (False, True):
        target.spec = replace(target.spec, rounds_drafts=rounds_drafts)
        given = [_options(draft_model=None, speculation=kind) for kind in ("auto", "none", "ngram")]
        found += [uses_drafts(each, target) for each in given]
    assert found == [True, False, True, False, False, True]
    assert uses_drafts(_options(), target)
    target.spec = replace(target.spec, verifies_drafts=False)
    assert not uses_drafts(_options(draft_model=None), target)
    with pytest.raises(StartupError, match="--speculation is ngram, but FakePass cannot verify guessed tokens"):
        uses_drafts(_options(speculation="ngram"), target)
