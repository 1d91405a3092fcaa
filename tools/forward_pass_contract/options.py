"""A pytest plugin: the suite's options, and the forward pass that they name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.forward_pass import IBatchedForwardPass, PassOptions
from penstock.backend.forward_pass.extensions import ICheckpointsStates, IPersistsPages
from penstock.backend.forward_pass.plugins import find_forward_pass
from penstock.backend.scheduling.drafting import MAX_STATE_DRAFTS
from penstock.tools.forward_pass_contract.steps import (
    MAX_BATCH_TOKENS,
    MAX_RUNNING,
    NUM_CHECKPOINTS,
    NUM_PAGES,
    PlacesInMemory,
    page_size_of,
)

_HOST_KV_BYTES = 64 << 20
"""Host memory for passes that keep pages on the host."""
_NUM_PLACES = 3
"""Host pages of passes that can keep them in memory which outlives the process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("forward pass contract")
    group.addoption("--forward-pass", help='the pass under test: an installed name or "package.module:Class"')
    group.addoption("--model", type=Path, help="the checkpoint directory that the pass loads; default: none")
    group.addoption(
        "--adapter",
        type=Path,
        action="append",
        default=[],
        help="the directory of a LoRA adapter of the model; give it twice",
    )


@pytest.fixture(scope="module")
def forward_pass(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The pass of --forward-pass, with its cache."""
    name = request.config.getoption("--forward-pass")
    if name is None:
        pytest.skip("no --forward-pass is given")
    loaded = load_pass(name, request.config.getoption("--model"), adapters=request.config.getoption("--adapter"))
    yield loaded
    loaded.close()


def load_pass(
    name: str,
    model_dir: Path | None,
    kv_dtype: str | None = None,
    quantize: str = "none",
    adapters: Sequence[Path] = (),
) -> IBatchedForwardPass:
    """A pass with a cache of NUM_PAGES pages, unless it has none. In fp32 if it offers that: the tolerance of
    comparisons is for fp32."""
    options = PassOptions(
        dtype="fp32",
        max_running=MAX_RUNNING,
        max_batch_tokens=MAX_BATCH_TOKENS,
        host_kv_bytes=_HOST_KV_BYTES,
        quantize=quantize,
        splits_layers=True,
        may_run_ahead=True,
        num_state_drafts=MAX_STATE_DRAFTS,
        adapters=tuple(adapters),
    )
    loaded = find_forward_pass(name).load(model_dir, options)
    if kv_dtypes := list(loaded.spec.kv_bytes_per_token):
        kv_dtype = kv_dtype or ("fp32" if "fp32" in kv_dtypes else kv_dtypes[0])
        loaded.create_cache(NUM_PAGES * len(loaded.spec.kv_windows), page_size_of(loaded), kv_dtype)
        if loaded.spec.copies_states and isinstance(loaded, ICheckpointsStates):
            loaded.create_checkpoints(NUM_CHECKPOINTS)
        if isinstance(loaded, IPersistsPages):
            page_bytes = page_size_of(loaded) * loaded.spec.kv_bytes_per_token[kv_dtype] // len(loaded.spec.kv_windows)
            sizes = [*[page_bytes] * _NUM_PLACES, loaded.spec.state_bytes_per_sequence]
            loaded.persist_pages(PlacesInMemory([np.zeros(size, np.uint8) for size in sizes]))
    return loaded
