"""The kernels of adapters agree with float64 on the emulator, and their memory serves adapters that come and go."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.checkpoint.tensor_files.lora_weights import ADAPTED_FIELDS, LoraWeights
from penstock.backend.passes.cuda.memory.lora import CudaAdapters, adapter_bytes
from penstock.backend.passes.cuda.ops.matmul import CudaLinear
from penstock.tools.gpu.cases.check import Mismatch
from penstock.tools.gpu.cases.products.adapters import cases, check_adapters, check_company
from tests.cuda_emulator import EmulatedLauncher
from tests.cuda_emulator.planting import VARIABLE, Bug, PlantedLauncher

CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_sums_agree_with_float64_and_depend_on_no_other_token(name: str) -> None:
    launcher = EmulatedLauncher()
    check_adapters(launcher, CASES[name])
    check_company(launcher, CASES[name])


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("wide")])
def test_sums_have_no_races_and_are_in_bounds(name: str, order: str) -> None:
    check_adapters(EmulatedLauncher("check", order, 3), CASES[name])  # type: ignore[arg-type]


@pytest.mark.parametrize("num_heads", [1, 4, 7, 9, 12, 28, 36, 60])
def test_joined_gates_of_a_delta_rule_take_no_more_than_announced(num_heads: int) -> None:
    rank, inputs = 64, 32
    parts = [
        LoraWeights(place * num_heads, torch.ones(rank, inputs), torch.ones(num_heads, rank)) for place in range(2)
    ]
    adapters = CudaAdapters(EmulatedLauncher(), torch.device("cpu"), torch.float32, 1, 1)
    weight = torch.empty(2 * num_heads, inputs)
    prepared = adapters.prepare(CudaLinear(weight, weight.t(), None), parts)
    config: Any = SimpleNamespace(num_layers=1, delta_net=SimpleNamespace(num_value_heads=num_heads))
    read: Any = SimpleNamespace(rank=rank, num_values=2 * (rank * inputs + (num_heads + -num_heads % 16) * rank))
    of_other_fields = 1024 * (len(ADAPTED_FIELDS) - 1)
    assert len(prepared) <= adapter_bytes(read, config, torch.float32) - of_other_fields


BUGS = tuple(
    Bug("lora.cu", right, wrong)
    for right, wrong in (
        ("part.first_rank + r", "r"),
        ("of(first + t) == one", "of(first + t) == one || first + t < num_tokens"),
        ("(part.num_outputs + 7) / 8 * 8", "outputs"),
        ("column - part.first_output", "column"),
        ("gridDim.y * kWarps * kRanksAtOnce", "1 << 20"),
        ("k += 32 * 8", "k += 64 * 8"),
    )
)


def test_each_planted_bug_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, case = PlantedLauncher(tmp_path, ("lora.cu",), BUGS), CASES["wide.bf16"]
    check_adapters(launcher, case)
    for number, _ in enumerate(BUGS):
        monkeypatch.setenv(VARIABLE, str(number))
        with pytest.raises(Mismatch):
            check_adapters(launcher, case)


def test_adapters_that_come_and_go_find_room_in_the_gaps() -> None:
    """Each takes 128 + 4 * (4 * 8 + 8 * rank) bytes; the memory holds three of rank 4."""
    adapters = CudaAdapters(EmulatedLauncher(), torch.device("cpu"), torch.float32, 4, 3 * 384)
    linears = [CudaLinear(weight := torch.zeros(8, 8), weight.t(), None) for _ in range(2)]
    adapters.open(linears)
    rng, down, ups = np.random.default_rng(2), torch.eye(8)[:4], dict[tuple[int, int], torch.Tensor]()
    x = torch.randn(1, 8, generator=torch.Generator().manual_seed(1))
    for turn in range(40):
        key = int(rng.integers(2)), int(rng.integers(4))
        if key in ups or len(ups) == 3:
            key = key if key in ups else next(iter(ups))
            adapters.put(linears[key[0]], key[1], None)
            del ups[key]
        else:
            ups[key] = torch.full((8, 4), float(turn))
            adapters.put(linears[key[0]], key[1], adapters.prepare(linears[key[0]], [LoraWeights(0, down, ups[key])]))
        for which, linear in enumerate(linears):
            for index in range(4):
                out = torch.zeros(1, 8)
                adapters.add(x, linear, out, torch.tensor([index], dtype=torch.int32))
                expected = x @ down.T @ ups.get((which, index), torch.zeros(8, 4)).T
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
