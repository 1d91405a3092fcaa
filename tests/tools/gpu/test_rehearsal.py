"""The commands of docs/gpu/README.md for a GPU that is lent for minutes, on the emulated device with small sizes."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.tools.gpu import items
from penstock.tools.gpu.__main__ import make_parser
from penstock.tools.gpu.cases import catalogue
from penstock.tools.gpu.checks import correctness, invariance
from penstock.tools.gpu.devices import mirror_launcher
from penstock.tools.gpu.speed import ceilings, engine_runs, kernels, models
from tests.cuda_emulator import EmulatedLauncher
from tests.tools.gpu.test_models import TINY_LOADS, TINY_PLAN, LaunchProfiler
from tests.tools.gpu.test_speed import CEILINGS, SMALL, small

if TYPE_CHECKING:
    import argparse

    import pytest

    from penstock.tools.gpu.devices.device_context import DeviceContext
    from penstock.tools.gpu.items import Item
    from tests.tools.gpu.device_context import Record

PAGE = Path(__file__).parents[3] / "docs" / "gpu" / "README.md"


def commands() -> list[argparse.Namespace]:
    """The options of the page's commands with a fixed time."""
    text = PAGE.read_text().replace("\\\n", "")
    lines = [line.partition("#")[0] for line in text.splitlines() if line.startswith("python3 -m penstock.tools.gpu ")]
    options = [make_parser().parse_args(shlex.split(line)[3:]) for line in lines]
    return [each for each in options if each.seconds in (280.0, 240.0)]


def named(options: argparse.Namespace) -> list[Item]:
    return items.choose(options.first.split(","))


def test_the_items_of_each_command_fit_its_time() -> None:
    run_1, run_2 = commands()
    for options in (run_1, run_2):
        assert 0.7 * options.seconds < items.wall_seconds(named(options)) <= options.seconds - 8
    assert run_2.checkpoint
    names = {item.name for options in (run_1, run_2) for item in named(options)}
    settings = {name for item in (*named(run_1), *named(run_2)) for name, _ in item.settings}
    assert {"chunk_levels", "claimed_products", "grouped_rows", "quantised_rows", "rounded_rows"} <= settings
    assert {"checkpoint", "invariance.products", "model.experts", "engine.users"} <= names


class Mirror(EmulatedLauncher):
    shared_bytes_per_sm = 228 << 10
    has_wgmma = False


def test_one_item_of_each_kind_runs(record: Record, context: DeviceContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds but the checks that other tests run whole."""
    of_kind = {
        (item.module, "" if item.module == models.__name__ else item.arguments[:1], bool(item.settings)): small(item)
        for options in commands()
        for item in named(options)
        if ".speed." in item.module or item.module == invariance.__name__
    }
    small_checks = [check for check in catalogue.small_checks() if check.family == "experts"]
    tiny = replace(TINY_PLAN, decode=((1, 40),), prefill=(40,), profiled_rows=())
    plans = dict.fromkeys(models.PLANS, replace(tiny, profiled_rows=(1,)))
    sizes = invariance.PassSizes(
        tiny.config, tiny.dtype, ("bf16",), (invariance.BatchCase("tokens", 3, 1, 1, 1),), new_tokens=2
    )
    for module, name, value in (
        (mirror_launcher, "MirrorLauncher", Mirror),
        (correctness, "wide_checks", lambda _shared_bytes: small_checks),
        (correctness, "choice_checks", lambda _shared_bytes: ()),
        (invariance, "weight_shapes", lambda _config: {"o": (64, 32, 2)}),
        (invariance, "PassSizes", lambda: sizes),
        (ceilings, "CeilingSizes", lambda: CEILINGS),
        (kernels, "SIZES", SMALL),
        (models, "PLANS", plans),
        (models, "GpuProfiler", lambda: LaunchProfiler(context)),
        (engine_runs, "LOADS", TINY_LOADS),
    ):
        monkeypatch.setattr(module, name, value)
    chosen = [*of_kind.values(), *items.choose(["correctness.experts"])]
    for item in chosen:
        assert record.results.attempt(item.name, partial(import_module(item.module).run, record.results, item))
    names = set(record.findings())
    assert {
        "ceiling.read",
        "experts.2048+grouped_rows=257",
        "engine.offline",
        "correctness.experts",
        "invariance.whole.o",
    } <= names
    assert any(name.endswith("+whole_products=1.parts.prefill.step") for name in names)
