"""The section peers, on the emulated device with a tiny model."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.tools.gpu_check.checks import pass_agreement
from penstock.tools.gpu_check.devices.models import RandomWeights
from penstock.tools.gpu_check.engine_speed import transformers_batching as peers
from penstock.tools.gpu_check.model_configs import TINY
from tests.tools.gpu_check.device_context import Record, make_device_context


def test_transformers_model_computes_with_our_weights() -> None:
    transformers = pytest.importorskip("transformers")
    weights = RandomWeights(TINY, torch.float32, torch.device("cpu"))
    model = peers.make_model(transformers, TINY, weights, torch.float32, torch.device("cpu"))
    forward_pass = pass_agreement._on_cpu(TINY)
    ours = torch.from_numpy(pass_agreement._last_logits(forward_pass, TINY))
    prompts = torch.tensor(np.stack(pass_agreement._prompts(TINY))).long()
    with torch.inference_mode():
        theirs = model(prompts).logits[:, -1].double()
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_transformers_and_ours_are_measured_on_the_same_weights(record: Record) -> None:
    pytest.importorskip("transformers")
    sizes = peers.TransformersSizes(TINY, torch.float32, rows=3, prompt_tokens=20, new_tokens=8, batch_tokens=256)
    peers.measure(record.results, make_device_context(), sizes)
    found = record.findings()
    assert {"peers.ours", "peers.transformers_sdpa", "peers.transformers_sdpa_ratio"} <= set(found)
    assert found["peers.transformers_fa3_ratio"].detail.startswith("not measured: ")


@pytest.mark.parametrize(
    ("fields", "name", "options"),
    [
        (("block_size", "num_blocks"), "paged|sdpa", {"block_size": 256, "num_blocks": 96}),
        (
            ("page_size", "block_size", "auto_switch_to_flash"),
            "sdpa",
            {"page_size": 256, "auto_switch_to_flash": False},
        ),
    ],
)
def test_sdpa_is_requested_by_the_name_of_each_version(
    monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...], name: str, options: dict[str, object]
) -> None:
    """5.17 has blocks, and replaces sdpa with FlashAttention unless given paged|sdpa; later versions have pages."""
    kind = dataclasses.make_dataclass("Config", [(field, object, None) for field in fields])
    monkeypatch.setattr(peers, "_options_class", lambda: kind)
    names: list[str] = []
    given: list[dict[str, object]] = []

    def generate_batch(inputs: object, generation_config: object, continuous_batching_config: Any) -> dict[str, object]:
        given.append({field: value for field, value in vars(continuous_batching_config).items() if value is not None})
        return {}

    model = SimpleNamespace(set_attn_implementation=names.append, generate_batch=generate_batch)
    with pytest.raises(RuntimeError, match="0 of 16 requests ended"):
        peers.measure_transformers(
            SimpleNamespace(GenerationConfig=SimpleNamespace), model, peers.TransformersSizes(rows=16), "sdpa"
        )
    assert (names, given) == ([name], [options])


def test_peer_that_takes_too_long_is_abandoned() -> None:
    assert peers.run_with_timeout(60, lambda: 1.5) == 1.5
    with pytest.raises(ZeroDivisionError):
        peers.run_with_timeout(60, lambda: 1 / 0)
    never = threading.Event()
    with pytest.raises(TimeoutError, match="did not end within 0 s"):
        peers.run_with_timeout(0.01, lambda: float(never.wait()))
    never.set()
