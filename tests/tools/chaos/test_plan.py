"""The plan of requests and faults is the same for the same seed, and has everything in it."""

from __future__ import annotations

import base64
import io
from collections import Counter

from PIL import Image

from penstock.tools.chaos.plan import (
    FaultKind,
    Recipe,
    Stage,
    Tenant,
    Workload,
    draw_faults,
    make_further_recipes,
    make_recipes,
)

TENANTS = [Tenant("alice"), Tenant("bob")]


def workload(seed: int, drop_rate: float = 0.5) -> Workload:
    return Workload(make_recipes("m", 4096, seed, 20), TENANTS, entrances=2, seed=seed, drop_rate=drop_rate)


def test_same_seed_replays_the_same_requests() -> None:
    first, again, other = (list(workload(seed).groups(0, 300)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_requests_are_numbered_without_gaps_and_mixed() -> None:
    groups = list(workload(3).groups(0, 4000))
    acts = [act for group in groups for act in group]
    assert [act.index for act in acts] == list(range(4000))
    assert max(len(group) for group in groups) == 32
    dropped = [act for act in acts if act.hangup is not None]
    assert 0.45 < len(dropped) / len(acts) < 0.55
    assert {act.hangup.stage for act in dropped if act.hangup is not None} == set(Stage)
    assert {act.tenant.name for act in acts} == {"alice", "bob"}
    assert {act.entrance for act in acts} == {0, 1}
    assert any(act.pause_s for act in acts)
    assert len({act.cache_salt for act in acts}) > 400
    assert {act.is_stream for act in acts} == {act.may_join for act in acts} == {True, False}
    most_asked = Counter(act.recipe.name for act in acts).most_common(1)[0][1]
    assert most_asked > 100  # they meet and share a sequence


def pictures_of(recipe: Recipe) -> list[str]:
    content = recipe.body.get("messages", [{"content": ""}])[0]["content"]
    return [part["image_url"]["url"] for part in content if not isinstance(content, str) and "image_url" in part]


def test_recipes_have_every_kind_and_token_ids_need_a_known_vocabulary() -> None:
    recipes = make_recipes("m", None, 0, 1)
    assert {recipe.choices for recipe in recipes} >= {1, 4}
    assert any("response_format" in recipe.body for recipe in recipes)
    paths = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
    assert {recipe.path for recipe in recipes} == paths
    assert all(isinstance(recipe.body.get("prompt", ""), str | list) for recipe in recipes)
    assert all(recipe.body["temperature"] == 0 or "seed" in recipe.body for recipe in recipes)
    shown = [part for recipe in make_recipes("m", None, 0, 30, takes_pictures=True) for part in pictures_of(recipe)]
    assert len(set(shown)) > 5
    for url in shown:
        Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).load()


def test_further_models_are_asked_for_everything() -> None:
    recipes = make_further_recipes(["one", "two"], 0)
    assert {(recipe.body["model"], recipe.can_stream) for recipe in recipes} == {
        ("one", True), ("one", False), ("two", True), ("two", False),
    }  # fmt: skip
    acts = [act for group in Workload(recipes, TENANTS, 1, seed=0).groups(0, 400) for act in group]
    assert not any(act.is_stream or act.cache_salt for act in acts if not act.recipe.can_stream)


def test_every_fault_comes_in_its_turn_and_none_after_the_end_of_its_round() -> None:
    rounds = [draw_faults(5, number, 30.0, 5.0) for number in range(4)]
    assert rounds == [draw_faults(5, number, 30.0, 5.0) for number in range(4)]
    kinds = Counter(fault.kind for faults in rounds for fault in faults)
    assert set(kinds) == set(FaultKind)
    assert max(kinds.values()) - min(kinds.values()) <= 1
    assert all(0 < fault.at_s < 30.0 for faults in rounds for fault in faults)
    assert all(faults == sorted(faults, key=lambda fault: fault.at_s) for faults in rounds)
