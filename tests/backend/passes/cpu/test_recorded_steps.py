"""The native operations record the model's operations once; every later step runs the record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype
from penstock.backend.passes.cpu.library.native_structs import OperationKind
from penstock.backend.passes.cpu.native_ops import NativeOps
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.passes.decoder.model import DecoderModel
from tests.backend.passes.conftest import make_native_ops
from tests.backend.passes.decoder.driver import Driver
from tests.backend.passes.decoder.test_decoder_pass import checkpoint, make_pass


class UnrecordedOps:
    """Runs the operations of each step one by one."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def run_step(self, step: Any, forward: Any, *, needs_logits: bool) -> Any:
        return forward(step, needs_logits=needs_logits)


def run(driver: Driver) -> list[NDArray[np.float32]]:
    """Steps with and without logits, of growing size and number of logits, and some in a new cache."""
    logits = []
    for num_pages in (40, 48):
        driver.forward_pass.create_cache(num_pages, 16, "bf16")
        driver.free_pages, driver.rows = list(range(num_pages)), []
        first = driver.add(range(3, 40))
        assert driver.step([(first, 20)]) == {}
        logits += driver.step([(first, 17)]).values()
        others = [driver.add(range(index, index + 30)) for index in range(9)]
        logits += driver.step([(first, 1), *((row, 30) for row in others)]).values()
        logits += driver.step([(row, 1) for row in driver.rows]).values()
        # Embeddings replace what the first operation has looked up.
        embedded = driver.add_embedded(np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32))
        logits += driver.step([(first, 1), (embedded, 5)]).values()
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_recorded_steps_have_the_same_bits_as_single_operations(dtype: torch.dtype) -> None:
    found = run(Driver(make_pass("llama3", make_native_ops, dtype), 40, 16, "bf16"))
    config = read_decoder_config(checkpoint("llama3"))
    ops: Any = UnrecordedOps(make_native_ops(config, dtype))
    with open_weights(checkpoint("llama3"), config) as weights:
        expected = run(Driver(CpuDecoderPass(config, weights, ops, Dtype.of(dtype), max_running=32), 40, 16, "bf16"))
    assert len(found) == 2 * (1 + 10 + 10 + 2)
    np.testing.assert_array_equal(found, expected)


def test_model_runs_once_with_and_once_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    forward = DecoderModel.forward

    def counted(model: DecoderModel, step: Any, *, needs_logits: bool) -> Any:
        calls.append(needs_logits)
        return forward(model, step, needs_logits=needs_logits)

    monkeypatch.setattr(DecoderModel, "forward", counted)
    driver = Driver(make_pass("llama3", make_native_ops), 40, 16)
    row = driver.add(range(40))
    for _ in range(3):
        driver.step([(row, 5)])
    driver.prefill()
    driver.decode(6)
    assert calls == [False, True]


def test_timed_step_reports_every_operation_in_order() -> None:
    decoder = make_pass("llama3", make_native_ops)
    ops: Any = decoder._ops
    driver = Driver(decoder, 40, 16)
    driver.add(range(9))
    driver.prefill()
    ops.timed = []
    driver.decode(1)
    (timed,) = ops.timed
    kinds = [operation.kind for operation in timed.operations]
    layer = [
        OperationKind.NORM,
        OperationKind.LINEAR,
        OperationKind.ROTATE_AND_STORE,
        OperationKind.ATTENTION,
        OperationKind.LINEAR,
        OperationKind.NORM,
        OperationKind.LINEAR,
        OperationKind.LINEAR,
    ]
    num_layers = read_decoder_config(checkpoint("llama3")).num_layers
    head = [OperationKind.NORM, OperationKind.KEEP_LOGITS, OperationKind.LINEAR]
    last = [*layer[:3], OperationKind.TAKE_LAST, *layer[3:], *head]
    assert kinds == [OperationKind.EMBED, *layer * (num_layers - 1), *last]
    assert len(timed.times) == len(kinds)
    assert all(0 <= time.idle_ns <= 2 * time.elapsed_ns for time in timed.times)
    assert sum(time.elapsed_ns for time in timed.times) > 0
