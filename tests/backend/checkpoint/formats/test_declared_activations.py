"""Which checkpoints declare activations of 8 bits."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.backend.checkpoint.formats.declared import parse_stored_formats

INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FLOAT8 = INT8 | {"type": "float"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3"}


def rounds_rows(**settings: Any) -> bool:
    return parse_stored_formats({"quantization_config": settings}).rounds_rows


def compressed(*groups: tuple[dict[str, Any], dict[str, Any] | None]) -> dict[str, Any]:
    """Make groups of weights and input_activations."""
    named = {
        str(number): {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        for number, (weights, inputs) in enumerate(groups)
    }
    return {"quant_method": "compressed-tensors", "format": "naive-quantized", "config_groups": named}


@pytest.mark.parametrize(("scheme", "expected"), [("dynamic", True), ("static", True), (None, False), ("other", False)])
def test_fp8_declares_them_by_its_scheme(scheme: str | None, expected: bool) -> None:
    assert rounds_rows(**FP8 | {"activation_scheme": scheme}) is expected


@pytest.mark.parametrize(
    ("weights", "inputs", "expected"),
    [
        (INT8, INT8 | {"dynamic": True, "strategy": "token"}, True),
        (FLOAT8, FLOAT8 | {"dynamic": False}, True),
        (FLOAT8, INT8, False),
        (INT8, INT8 | {"num_bits": 4}, False),
        (INT8, None, False),
    ],
)
def test_compressed_tensors_declares_them_by_the_kind_of_the_weights(
    weights: dict[str, Any], inputs: dict[str, Any] | None, expected: bool
) -> None:
    assert rounds_rows(**compressed((weights, inputs))) is expected


def test_one_group_without_them_decides_for_all() -> None:
    assert rounds_rows(**compressed((INT8, INT8), (FLOAT8, FLOAT8)))
    assert not rounds_rows(**compressed((INT8, INT8), (INT8, None)))
    assert not rounds_rows(**compressed())


def test_other_methods_declare_none() -> None:
    assert not rounds_rows(quant_method="gptq", bits=4)
    assert not parse_stored_formats({}).rounds_rows
