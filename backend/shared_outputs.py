"""What clients get besides tokens: rows of a step's output, written to the buffers that they lent for them."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from backend.forward_pass import IDeviceLogits
from shm.device_api import DeviceRow

if TYPE_CHECKING:
    from backend.forward_pass import IBatchedForwardPass
    from backend.plan import Plan

_OUTPUT = attrgetter("output")


def share_outputs(forward_pass: IBatchedForwardPass, logits: Any, plan: Plan) -> None:
    """To be called between `forward` and `sample`, on their thread; logits are those of plan.logit_rows.

    Raises DeviceError where a copy on the device cannot be launched.
    """
    if not any(map(_OUTPUT, plan.sequences)):  # nearly always, so at next to no cost
        return
    on_device = on_host = None
    for row, index in enumerate(plan.logit_rows):
        sequence = plan.sequences[index]
        loan, generated_index = sequence.output, plan.ends[index] - sequence.output_start
        if loan is None or generated_index < 0 or not loan.wants(generated_index):
            continue
        if not loan.is_on_device:
            on_host = forward_pass.host_logits(logits) if on_host is None else on_host
            loan.write(generated_index, np.ascontiguousarray(on_host[row], np.float32).data)
        elif isinstance(forward_pass, IDeviceLogits):
            on_device = forward_pass.device_logits(logits) if on_device is None else on_device
            loan.write(generated_index, DeviceRow(on_device.pointer + row * loan.row_bytes, on_device.stream))
