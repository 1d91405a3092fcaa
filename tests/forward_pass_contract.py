"""The contract suite of `penstock.tools.forward_pass_contract`, run for the passes of this project.

    pytest tests/forward_pass_contract.py --forward-pass package.module:Class --model DIR

With --forward-pass it runs for that pass alone; with --model the pass loads that checkpoint, otherwise none.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

for name in ("test_contract", "test_drafts", "test_pooling", "test_lora"):
    pytest.register_assert_rewrite(f"penstock.tools.forward_pass_contract.{name}")

from penstock.backend.checkpoint.quantization import cached_file  # noqa: E402 - as the next lines
from penstock.backend.passes.shared_weights import packed_file  # noqa: E402
from penstock.tools.forward_pass_contract import (  # noqa: E402 - after the rewrite is registered
    test_contract,
    test_drafts,
    test_lora,
    test_pooling,
)
from penstock.tools.forward_pass_contract.options import load_pass  # noqa: E402
from tests.checkpoints import load_oracle, make_checkpoint  # noqa: E402
from tests.encoder_checkpoints import make_encoder  # noqa: E402
from tests.lora import make_adapter  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

# The suites' tests and their fixtures, collected from this module with the fixture below.
for suite in (test_contract, test_drafts, test_pooling, test_lora):
    is_theirs = ("test_", "runner", "drafting", "pooling", "adapted")
    globals().update({name: value for name, value in vars(suite).items() if name.startswith(is_theirs)})

_EMULATED = "tests.backend.passes.cuda.emulated_pass:EmulatedCudaPass"
_TRANSFORMERS = "penstock.backend.passes.transformers_model.forward_pass:TransformersPass"
_FAKE_ADAPTERS = (Path("one"), Path("two"))
_GROUPED = "decoder whose layers are several groups"
_WITH_STATE = "decoder with a state"
_ENCODER = "encoder"
_ARCHITECTURES = {_GROUPED: "gemma3", _WITH_STATE: "qwen3.5"}
_OWN_PASSES = [
    ("fake", None, "none"),
    ("tests.fake_passes:StatefulFakePass", None, "none"),
    ("tests.fake_passes:WindowedFakePass", None, "none"),
    ("tests.fake_passes:GroupedFakePass", None, "none"),
    ("tests.fake_encoder:FakeEncoder", None, "none"),
    ("tests.fake_encoder:PoolingFakePass", None, "none"),
    (_ENCODER, None, "none"),
    (_ENCODER, None, "int8"),
    ("decoder", None, "none"),
    ("decoder", "q8_0", "none"),
    ("decoder", None, "int4"),
    (_GROUPED, None, "none"),
    (_WITH_STATE, None, "none"),
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
    takes_adapters = pass_name != _WITH_STATE
    if pass_name in _ARCHITECTURES and model_dir is None:
        model_dir = make_checkpoint(_ARCHITECTURES[pass_name], tmp_path_factory.mktemp("contract"))
        pass_name = "decoder"
    if pass_name == _ENCODER and model_dir is None:
        model_dir = tmp_path_factory.mktemp("contract")
        make_encoder("bert", "Model", model_dir)
    with pytest.MonkeyPatch.context() as patch:
        for module in (cached_file, packed_file):
            patch.setattr(module, "cache_directory", lambda: tmp_path_factory.mktemp("cache"))
        adapters = request.config.getoption("--adapter")
        if pass_name == "fake" or ".fake:" in pass_name:
            adapters = adapters or _FAKE_ADAPTERS
        elif pass_name in ("decoder", _EMULATED) and takes_adapters and request.config.getoption("--model") is None:
            model = load_oracle(model_dir)
            adapters = [make_adapter(model, tmp_path_factory.mktemp("adapter"), seed=seed) for seed in (1, 2)]
        loaded = load_pass(pass_name, model_dir, kv_dtype, quantize, adapters)
    yield loaded
    loaded.close()
