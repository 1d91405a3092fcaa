from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.backend.errors import StartupError
from penstock.backend.options import BackendOptions
from penstock.backend.passes.decoder.cpu import forward_pass
from penstock.backend.passes.decoder.cpu.native_structs import LinearOutput, Operation, OperationKind
from penstock.backend.passes.decoder.cpu.path_choice import load_kernels
from penstock.backend.passes.decoder.cpu.weight_memory.anonymous import map_memory
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.step_parts import name_parts
from penstock.tools.bench.load_generator.stats import ObservedRequest, Outcome
from penstock.tools.bench.serving.one_stream import stream_times
from penstock.tools.bench.serving.stream_profile import Profiler, huge_page_share

if TYPE_CHECKING:
    from tests.tools.bench.conftest import BenchCommand

PARTS = {
    "embedding",
    "norms",
    "qkv",
    "rotate and store",
    "attention",
    "o",
    "gate and up",
    "down",
    "last tokens",
    "logits",
}


@pytest.fixture(autouse=True)
def native_kernels() -> None:
    if load_kernels() is None:
        pytest.skip("this machine has no native kernels")


def test_operations_are_named_by_their_place_in_a_layer() -> None:
    linear, add = OperationKind.LINEAR, LinearOutput.ADD
    steps = [(OperationKind.EMBED, 0), (OperationKind.NORM, 0), (linear, LinearOutput.STORE)]
    steps += [(OperationKind.ROTATE_AND_STORE, 0), (OperationKind.ATTENTION, 0), (linear, add)]
    steps += [(OperationKind.NORM, 0), (linear, LinearOutput.GATED_SILU), (linear, add)]
    steps += [(OperationKind.TAKE_LAST, 0), (linear, LinearOutput.STORE_FLOAT)]
    names = list(name_parts([Operation(kind=kind, form=form) for kind, form in steps]))
    assert names == [
        *("embedding", "norms", "qkv", "rotate and store", "attention", "o"),
        *("norms", "gate and up", "down", "last tokens", "logits"),
    ]


def test_router_and_gate_of_experts_are_routing() -> None:
    linear, kinds = (
        OperationKind.LINEAR,
        (OperationKind.ROUTE, OperationKind.EXPERT_INPUTS, OperationKind.EXPERT_OUTPUTS),
    )
    steps = [(linear, LinearOutput.GATED_SILU), (linear, LinearOutput.STORE_FLOAT), (OperationKind.WEIGHT_ROWS, 64)]
    steps += [(linear, LinearOutput.STORE_FLOAT), *((kind, 0) for kind in kinds), (linear, LinearOutput.ADD)]
    names = list(name_parts([Operation(kind=kind, form=form) for kind, form in steps]))
    assert names == [
        *("gate and up", "routing", "routing", "routing", "routing"),
        *("experts: gate and up", "experts: down", "down"),
    ]


def test_profile_of_the_demo_model_accounts_for_its_step() -> None:
    options = BackendOptions(gpu="none")
    profiler = Profiler(options, context_tokens=20)
    profile = profiler.profile(3)
    assert {part.name for part in profile.parts} == PARTS
    assert all(0 <= part.idle_ms <= part.elapsed_ms for part in profile.parts)
    norm_bytes = 4 * 256 * (2 * 4 + 1)  # two in each of 4 layers, and the last one
    # Embeddings are tied: the memory has linears and norms.
    assert profile.weight_bytes + norm_bytes == sum(part.nbytes for part in profiler.weights.memory())
    assert 0 < profile.least_read_ms <= profile.read_ms
    assert 0 < profile.sampling_ms < profile.step_ms
    assert profile.ratio > 0


def test_profile_without_native_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_pass, "load_kernels", lambda _path: None)
    with pytest.raises(StartupError, match="native kernels"):
        Profiler(BackendOptions(gpu="none"), context_tokens=20)


def test_huge_page_share_counts_only_the_given_memory() -> None:
    size = 4 << 20
    small = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    small.madvise(mmap.MADV_NOHUGEPAGE)
    small.write(b"x" * size)
    assert huge_page_share([torch.frombuffer(small, dtype=torch.uint8)]) == 0.0
    large = map_memory(size)
    large.write(b"x" * size)
    assert 0.0 <= huge_page_share([torch.frombuffer(large, dtype=torch.uint8)]) <= 1.0
    assert huge_page_share([]) == 0.0


def test_inter_token_latency_leaves_out_the_first_token() -> None:
    record = ObservedRequest(0.0, [5.0, 5.25, 5.5, 6.5], 6.5, 1, 4, Outcome.COMPLETED)
    times = stream_times(record)
    assert times.itl_ms == pytest.approx(500)
    assert times.median_itl_ms == pytest.approx(250)


def test_failed_stream_and_stream_of_one_event_end_the_measurement() -> None:
    with pytest.raises(BenchError, match="boom"):
        stream_times(ObservedRequest(0.0, error="boom"))
    with pytest.raises(BenchError, match="answer-tokens"):
        stream_times(ObservedRequest(0.0, [1.0], 1.0, 1, 3, Outcome.COMPLETED))


def test_one_stream_compares_steps_and_server_with_reading_the_weights(bench: BenchCommand) -> None:
    run = bench("one-stream", "--gpu", "none", "--answer-tokens", "12", "--steps", "2", "--rounds", "1")
    assert run.status == 0, run.errors
    found = run.report["sections"]["one_stream"]
    (entry,) = found["rounds"]
    assert {part["name"] for part in entry["profile"]["parts"]} == PARTS
    assert 0 < entry["served"]["server_step_ms"] < entry["served"]["itl_ms"] * 2
    assert found["step_ratio"] == entry["profile"]["ratio"]
    assert found["itl_ratio"] == pytest.approx(entry["served"]["itl_ms"] / entry["profile"]["read_ms"])
    assert [aim["limit"] for aim in run.report["aims"]] == [1.15]
    assert "between the server's steps" in run.output
