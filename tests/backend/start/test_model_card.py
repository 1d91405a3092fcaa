from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.backend.errors import StartupError
from penstock.backend.kv_cache.budget.kv_plan import KvBudget, KvPlan, plan_kv
from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.model_names import DEMO_MODEL_DIR
from penstock.backend.options import BackendOptions
from penstock.backend.passes.fake import FakePass
from penstock.backend.sampling.defaults import SAMPLING_SETTING
from penstock.backend.start.model_card import ModelNames, fingerprint, make_card
from penstock.shm.messages import Adapter

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backend.forward_pass import PassSpec


def plan_of(spec: PassSpec) -> KvPlan:
    return plan_kv(
        spec, budget=KvBudget(10**6), kv_dtype="auto", groups=KvGroups(16), max_context_tokens=None, max_running=1
    )


def test_other_weights_of_the_same_size_have_another_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3_000_000))
    before = fingerprint(tmp_path, "")
    weights.write_bytes(bytes(2_900_000) + b"\1" * 100_000)
    assert fingerprint(tmp_path, "") != before
    weights.write_bytes(bytes(3_000_000))
    assert fingerprint(tmp_path, "") == before
    assert fingerprint(tmp_path, "bf16") != before


def test_model_name_that_frontends_refuse_is_refused_at_start() -> None:
    spec = replace(FakePass(100, 1).spec, quantization="int4")
    plan = plan_of(spec)
    card = make_card(ModelNames("m"), DEMO_MODEL_DIR, spec, plan, 10, {})
    assert card.fingerprint.startswith("fp_")
    assert card.quantization == "int4"
    chosen = make_card(ModelNames("m"), DEMO_MODEL_DIR, spec, plan, 10, {SAMPLING_SETTING: '{"temperature": 0.25}'})
    assert chosen.default_sampling == msgspec.structs.replace(card.default_sampling, temperature=0.25)
    assert chosen.fingerprint != card.fingerprint
    with pytest.raises(StartupError, match="announced"):
        make_card(ModelNames("m" * 600), DEMO_MODEL_DIR, spec, plan, 10, {})
    names = ModelNames("m", adapters=tuple(Adapter(f"{n:0512}", "i" * 64, 8) for n in range(256)))
    with pytest.raises(StartupError, match=r"take \d{6} bytes; the limit is 120000"):
        make_card(names, DEMO_MODEL_DIR, spec, plan, 10, {})


@pytest.mark.parametrize(
    ("given", "model_id", "aliases"),
    [
        (None, "penstock-demo", ()),
        ("one", "one", ()),
        ("one, two,one", "one", ("two",)),
        ("*", "penstock-demo", ("*",)),
        ("*,one", "one", ("*",)),
        (",", "penstock-demo", ()),
    ],
)
def test_first_served_name_is_the_models_and_the_others_are_aliases(
    given: str | None, model_id: str, aliases: tuple[str, ...]
) -> None:
    options = BackendOptions(served_model_name=given)
    assert (options.model_id(), options.aliases()) == (model_id, aliases)


@pytest.mark.parametrize(
    ("made", "declared", "told"),
    [("none", None, "none"), ("none", "gptq", "gptq"), ("int8", "fp8", "int8")],
)
def test_card_says_how_weights_are_quantised(made: str, declared: str | None, told: str, tmp_path: Path) -> None:
    spec = replace(FakePass(100, 1).spec, quantization=made)
    plan = plan_of(spec)
    config = {} if declared is None else {"quantization_config": {"quant_method": declared}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert make_card(ModelNames("m"), tmp_path, spec, plan, 10, {}).quantization == told


def test_card_names_what_its_fingerprint_covers(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    spec = FakePass(100, 1).spec
    plan = plan_of(spec)
    traits = []
    for name in ("", "config.json", "tokenizer.json", "model.safetensors"):
        if name:
            (tmp_path / name).write_text("{ }")
        traits.append(dict(make_card(ModelNames("m"), tmp_path, spec, plan, 10, {"dtype": "bf16"}).traits))
    assert traits[0]["dtype"] == "bf16"
    changed = [{name for name in before if before[name] != after[name]} for before, after in pairwise(traits)]
    assert changed == [{"configuration"}, {"configuration", "tokenizer"}, {"weights"}]


def test_sampling_that_the_pass_does_not_apply_is_refused_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = replace(FakePass(100, 1).spec, has_llama_cpp_sampling=False)
    plan = plan_of(spec)
    with pytest.raises(StartupError, match="--default-sampling: top_n_sigma: this forward pass samples without it"):
        make_card(ModelNames("m"), DEMO_MODEL_DIR, spec, plan, 10, {SAMPLING_SETTING: '{"top_n_sigma": 1}'})
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"xtc_probability": 0.5}')
    assert make_card(ModelNames("m"), tmp_path, spec, plan, 10, {}).default_sampling.xtc_probability == 0.0
    assert "the model's files set xtc_probability" in caplog.text
    knows = replace(spec, has_llama_cpp_sampling=True)
    assert make_card(ModelNames("m"), tmp_path, knows, plan, 10, {}).default_sampling.xtc_probability == 0.5
