"""What is timed, on the emulated device with small sizes: ceilings, kernels, another checkout's beside them."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.backend.checkpoint.config.decoder_config import Experts
from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.backend.passes.ops.interface import HeadShape
from penstock.tools.gpu import items
from penstock.tools.gpu.devices.caches import fill_cache
from penstock.tools.gpu.devices.other_tree import OtherTree, SharedBuffers
from penstock.tools.gpu.speed import ceilings, kernels
from penstock.tools.gpu.speed.kernel_cases import KernelSizes, PreparedCase
from tests.tools.gpu.device_context import Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.tools.gpu.devices.device_context import DeviceContext

ROOT = Path(__file__).parents[3]
SMALL = KernelSizes(
    HeadShape(4, 2, 64), 256, 64, 300, sampling_rows=3, encoder_heads=1,
    experts=Experts(4, 2, 32, normalises=True), expert_hidden=64, cold_bytes=50_000,
)  # fmt: skip
CEILINGS = ceilings.CeilingSizes(4096, 32)


def small(item: items.Item) -> items.Item:
    """The item with fewer rows and tokens: 19 of each at most."""
    return replace(item, arguments=tuple(min(each, 19) if type(each) is int else each for each in item.arguments))


@pytest.mark.usefixtures("context")
def test_ceilings_are_measured(record: Record) -> None:
    ceilings.run(record.results, items.choose(["ceilings"])[0], CEILINGS)
    found = record.findings()
    assert {"ceiling.read", "ceiling.product", "ceiling.product.int8", "ceiling.product.fp8"} <= set(found)


def test_each_kind_of_kernel_has_a_time_and_its_work(
    record: Record, context: DeviceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "SIZES", SMALL)
    names = (
        "attention.decode.1x1k", "attention.decode.64x1k.q8_0", "attention.prefill.1k_after_8k",
        "attention.prefill.4k.fp8", "attention.encoder.2x8k.local", "sampling.256.filtered",
        "product.library.lm_head.4", "experts.64",
        "product.int8.32", "product.fp8.1", "product.q4_1.8", "product.mxfp4.64",
        *(f"product.bf16.{weight}.4" for weight in ("qkv", "o", "gate_up", "down", "lm_head")),
    )  # fmt: skip
    for item in items.choose(names):
        kernels.run(record.results, small(item))
    found = record.findings()
    ways = {"product.int8.32": ("own", "widened", "rounded"), "product.fp8.1": ("own", "widened"),
            "product.q4_1.8": ("own", "widened"), "product.mxfp4.64": ("own", "widened")}  # fmt: skip
    expected = {f"{name}.{way}" if way else name for name in names for way in ways.get(name, ("",))}
    assert set(found) == expected
    for name, finding in found.items():
        assert finding.unit == "us"
        assert finding.num_bytes or finding.flop, name
    assert "multiply_rows" in context.device.launcher.last_launch  # type: ignore[attr-defined]


def test_settings_are_timed_beside_the_adopted_ones(
    record: Record, context: DeviceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "SIZES", SMALL)
    launched: list[int] = []
    monkeypatch.setattr(kernels, "prepare", lambda _sizes, context, *_: [
        PreparedCase([lambda: launched.append(context.choices.chunk_levels)], 8.0)
    ])  # fmt: skip
    kernels.run(record.results, items.choose(["attention.decode.1x1k+chunk_levels=1"])[0])
    found = record.findings()
    assert list(found) == ["attention.decode.1x1k", "attention.decode.1x1k+chunk_levels=1"]
    assert found["attention.decode.1x1k+chunk_levels=1"].detail.endswith(" times as fast")
    assert launched == [0, 0, 1, 1]
    assert context.choices.chunk_levels == 0


def test_another_checkouts_kernels_are_timed_in_turns_with_ours(
    record: Record, context: DeviceContext, tmp_path: Path
) -> None:
    """The other checkout has links to this one's files, and other sizes in one module."""
    changed = tmp_path / "tools" / "gpu" / "speed" / "kernels.py"
    make_links(ROOT, tmp_path, but=("tools", "penstock"))
    make_links(ROOT / "penstock", tmp_path / "penstock")
    for part in ("tools", "tools/gpu", "tools/gpu/speed"):
        make_links(ROOT / part, tmp_path / part, but=("gpu", "speed", "kernels.py"))
    source = (ROOT / changed.relative_to(tmp_path)).read_text()
    changed.write_text(source.replace("SIZES = KernelSizes()", "SIZES = KernelSizes(sampling_rows=3, vocab_size=300)"))
    tree = OtherTree(tmp_path, ("penstock", "tests"))
    emulated = tree.load("tests.tools.gpu.device_context").make_device_context
    tree.load("penstock.tools.gpu.devices.device_context").open_device_context = emulated
    there = tree.load("penstock.tools.gpu.speed.kernels")
    assert there.__file__ == str(tmp_path / "penstock" / "tools" / "gpu" / "speed" / "kernels.py")
    (item,) = items.choose(["sampling.256.greedy"])
    ours = kernels.Side("", lambda *arguments: kernels.prepare(SMALL, context, *arguments))
    kernels.compare(record.results, context, small(item), [ours, kernels.other_side(tree)])
    assert [finding.name for finding in record.all()] == ["sampling.256.greedy", f"sampling.256.greedy@{tmp_path.name}"]
    assert len({each.num_bytes for each in record.all()}) == 1
    assert sys.modules["penstock.tools.gpu.speed.kernels"] is kernels
    with pytest.raises(ModuleNotFoundError):
        tree.load("penstock.nothing")
    assert str(tmp_path) not in sys.path


def make_links(source: Path, target: Path, but: tuple[str, ...] = ()) -> None:
    """Link the entries of a folder, as links that do not leave it."""
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.name not in but:
            (target / path.name).symlink_to(path.readlink() if path.is_symlink() else path)


def test_large_buffers_are_given_again_in_order() -> None:
    buffers = SharedBuffers()
    with buffers:
        first = [torch.empty(1 << 24, dtype=torch.uint8) for _ in range(2)]
        small_one = torch.empty(3)
    buffers.rewind()
    with buffers:
        again = [torch.empty(1 << 24, dtype=torch.uint8) for _ in range(3)]
        assert torch.empty(3).data_ptr() != small_one.data_ptr()
        assert torch.empty(1 << 22).data_ptr() not in {each.data_ptr() for each in again}
    assert [each.data_ptr() for each in again[:2]] == [each.data_ptr() for each in first]
    assert again[2].data_ptr() not in {each.data_ptr() for each in first}


def test_one_case_is_launched_for_a_profiler(context: DeviceContext, capsys: pytest.CaptureFixture[str]) -> None:
    launched: list[str] = []

    @contextmanager
    def profiling() -> Iterator[None]:
        launched.append("begin")
        yield
        launched.append("end")

    kernels.run_case(PreparedCase([lambda: launched.append("work")]), context, profiling())
    assert launched == ["work", "work", "begin", "work", "work", "work", "end"]
    assert kernels.main(["nothing"]) == 2
    assert "attention.decode.64x1k" in capsys.readouterr().err


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "q8_0", "fp8"])
def test_caches_are_filled_with_finite_numbers(kv_dtype: str) -> None:
    layout = CacheLayout(2, 3, 16, 2, 64, kv_dtype)
    cache = torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8)
    fill_cache(cache, layout)
    numbers = cache.view(-1, layout.block_bytes)
    if kv_dtype == "q8_0":
        scales = numbers[:, 16 * 64 :].contiguous().view(torch.float16)
        assert ((scales >= 0) & (scales < 0.03)).all()
    else:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[kv_dtype]
        assert numbers.view(dtype).float().isfinite().all()
