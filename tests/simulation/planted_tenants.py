"""Bugs to plant in how tenants share the device."""

from __future__ import annotations

from typing import Any

from penstock.backend.scheduling.tenants import Tenants
from penstock.backend.scheduling.wait_queue import WaitQueue
from tests.simulation.planting import Plant, wrap


def _ignores_weights(open_account: Any, tenants: Tenants, key: bytes, _weight: float) -> Any:
    return open_account(tenants, key, 1.0)


TENANT_BUGS: dict[str, Plant] = {
    "nothing is charged": wrap(Tenants, "charge", lambda *_: None),
    "generated tokens are free": wrap(Tenants, "charge_decodes", lambda *_: None),
    "weights are ignored": wrap(Tenants, "open", _ignores_weights),
    "a newcomer has saved up service": wrap(WaitQueue, "floor", lambda *_: 0.0),
    "a sequence that does not fit is never looked at again": wrap(
        WaitQueue, "passed", lambda _passed, _queue: iter(())
    ),
}
