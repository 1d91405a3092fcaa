"""The parts of a decode step that the native kernels' operations belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.backend.passes.decoder.cpu.native_structs import LinearOutput, Operation, OperationKind

_NAMES: dict[int, str] = {
    OperationKind.EMBED: "embedding",
    OperationKind.NORM: "norms",
    OperationKind.ADD_NORM: "norms",
    OperationKind.CAP_LOGITS: "logits",
    OperationKind.ROTATE_AND_STORE: "rotate and store",
    OperationKind.ATTENTION: "attention",
    OperationKind.TAKE_LAST: "last tokens",
    OperationKind.ROUTE: "routing",
    OperationKind.EXPERT_INPUTS: "experts: gate and up",
    OperationKind.EXPERT_OUTPUTS: "experts: down",
    OperationKind.WEIGHT_ROWS: "routing",
}
_ROUTING = (OperationKind.ROUTE, OperationKind.WEIGHT_ROWS)
_LINEAR_NAMES: dict[int, str] = {
    LinearOutput.STORE: "qkv",
    LinearOutput.GATED_SILU: "gate and up",
    LinearOutput.GATED_GELU: "gate and up",
    LinearOutput.GELU: "gate and up",
    LinearOutput.STORE_FLOAT: "logits",
}


def name_parts(operations: Sequence[Operation]) -> Iterator[str]:
    """Yield the part of the step that each operation belongs to."""
    after = ""
    for operation, following in zip(operations, (*operations[1:], None), strict=True):
        if operation.kind in _NAMES:
            name = _NAMES[operation.kind]
        elif following is not None and following.kind in _ROUTING:
            name = "routing"
        elif operation.form == LinearOutput.ADD:
            name = "o" if after == "attention" else "down"
        else:
            name = _LINEAR_NAMES[operation.form]
        yield name
        after = name
