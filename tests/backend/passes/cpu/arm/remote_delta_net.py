"""Copies the arrays of a layer with a delta rule to the driver of another CPU's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.backend.passes.cpu.library.native_structs import DeltaNet

if TYPE_CHECKING:
    from tests.backend.passes.cpu.arm.kernel_driver import RemoteArguments

_FLOAT = 4


def copy_delta_net(arguments: RemoteArguments, op: Any, slots: int, tokens: int, number_bytes: int) -> dict[str, int]:
    """Returns the addresses of the operation's arrays. number_bytes: of an activation."""
    own = DeltaNet.from_address(op.weights)
    values = own.value_heads * own.value_dim
    channels = 2 * own.key_heads * own.key_dim + values
    read = {
        "conv": own.width * channels,
        "bias": own.value_heads,
        "decays": own.value_heads,
        "norm": own.value_dim,
    }
    changed = {
        "states": slots * values * own.key_dim,
        "inputs": slots * (own.width - 1) * channels,
        "gates": tokens * 2 * own.value_heads,
        "mixed": tokens * channels,
    }
    copies = {name: arguments.read_only(getattr(own, name), size * _FLOAT) for name, size in read.items()}
    copies |= {name: arguments.changed(getattr(own, name), size * _FLOAT) for name, size in changed.items()}
    return {
        "weights": arguments.of_struct(own, **copies),
        "x": arguments.read_only(op.x, tokens * (channels + values) * number_bytes),
        "out": arguments.changed(op.out, tokens * values * number_bytes),
    }
