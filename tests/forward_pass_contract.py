"""The contract suite of `penstock.tools.forward_pass_contract`, run for the passes of this project.

    pytest tests/forward_pass_contract.py --forward-pass package.module:Class --model DIR

With --forward-pass it runs for that pass alone; with --model the pass loads that checkpoint, otherwise none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.register_assert_rewrite("penstock.tools.forward_pass_contract.test_contract")

from penstock.backend.checkpoint.quantization import kept_file  # noqa: E402 - as the next lines
from penstock.tools.forward_pass_contract import test_contract  # noqa: E402 - after the rewrite is registered
from penstock.tools.forward_pass_contract.options import load_pass  # noqa: E402
from tests.checkpoints import make_checkpoint  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# The suite's tests and their fixture, collected from this module with the fixtures below.
globals().update({name: value for name, value in vars(test_contract).items() if name.startswith(("test_", "runner"))})

_EMULATED = "tests.backend.passes.decoder.cuda.emulated_pass:EmulatedCudaPass"
_TRANSFORMERS = "penstock.backend.passes.transformers_model.forward_pass:TransformersPass"
_OWN_PASSES = [
    ("fake", None, "none"),
    ("decoder", None, "none"),
    ("decoder", "q8_0", "none"),
    ("decoder", None, "int4"),
    (_EMULATED, None, "none"),
    (_TRANSFORMERS, None, "none"),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pass_name" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--forward-pass")
        passes = [(chosen, None, "none")] if chosen else _OWN_PASSES
        metafunc.parametrize(("pass_name", "kv_dtype", "quantize"), passes, scope="module")


@pytest.fixture(scope="module")
def forward_pass(
    pass_name: str,
    kv_dtype: str | None,
    quantize: str,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    model_dir: Path | None = request.config.getoption("--model")
    if pass_name in ("decoder", _EMULATED, _TRANSFORMERS) and model_dir is None:
        head_dim = 32 if pass_name == "decoder" else 64
        model_dir = make_checkpoint("llama3", tmp_path_factory.mktemp("contract"), head_dim=head_dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_file, "cache_directory", lambda: tmp_path_factory.mktemp("cache"))
        loaded = load_pass(pass_name, model_dir, kv_dtype, quantize)
    yield loaded
    loaded.close()
