"""Logits and hidden states for clients: rows of a step's output, written to the clients' shared buffers."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from penstock.backend.forward_pass.extensions import read_host_logits
from penstock.shm.buffers.device_api import DeviceRow

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.backend.forward_pass import DeviceRows, IBatchedForwardPass
    from penstock.backend.forward_pass.extensions import IDeviceHiddenStates, IDeviceLogits, IHiddenStates
    from penstock.backend.scheduling.step_plan import Plan

_OUTPUT = attrgetter("output")


def share_outputs(forward_pass: IBatchedForwardPass, logits: Any, plan: Plan) -> None:
    """Write the rows that clients requested. Call it between `forward` and `sample`, on their thread.

    logits is the handle that `forward` returned. Raises DeviceError when a copy on the device cannot be launched.
    """
    if not any(map(_OUTPUT, plan.sequences)):  # the usual case, so it must be fast
        return
    on_host: dict[bool, NDArray[np.float32]] = {}
    on_device: dict[bool, DeviceRows] = {}
    for row, index in enumerate(plan.logit_rows):
        sequence = plan.sequences[index]
        loan, generated_index = sequence.output, plan.ends[index] - sequence.num_prompt_tokens
        if loan is None or not loan.needs_row(generated_index):
            continue
        hidden = loan.holds_hidden_states
        if loan.is_on_device:
            if hidden not in on_device:
                on_device[hidden] = _device_rows(forward_pass, logits, hidden=hidden)
            rows = on_device[hidden]
            loan.write(generated_index, DeviceRow(rows.pointer + row * loan.row_bytes, rows.stream))
        else:
            if hidden not in on_host:
                on_host[hidden] = _host_rows(forward_pass, logits, hidden=hidden)
            loan.write(generated_index, np.ascontiguousarray(on_host[hidden][row], np.float32).data)


# Clients can request only what `make_exporter` found the pass to have, so the casts below hold.


def _host_rows(forward_pass: IBatchedForwardPass, logits: Any, *, hidden: bool) -> NDArray[np.float32]:
    if hidden:
        return cast("IHiddenStates", forward_pass).host_hidden_states(logits)
    return read_host_logits(forward_pass, logits)


def _device_rows(forward_pass: IBatchedForwardPass, logits: Any, *, hidden: bool) -> DeviceRows:
    if hidden:
        return cast("IDeviceHiddenStates", forward_pass).device_hidden_states(logits)
    return cast("IDeviceLogits", forward_pass).device_logits(logits)
