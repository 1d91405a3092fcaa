"""Bugs to plant in how vectors are delivered, and in what a refused frontend learns."""

from __future__ import annotations

from typing import Any

from penstock.backend.engine.requests import vector_delivery
from penstock.backend.engine.requests.delivery import Delivery
from penstock.backend.engine.requests.intake import Intake
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.tenant_account import Group, TenantAccount
from tests.simulation.planting import Plant, wrap


def _fails_all(fail_one: Any, delivery: Delivery, sequence: Sequence, *_: Any) -> None:
    for subscriber in list(sequence.subscribers):
        fail_one(delivery, sequence, subscriber)


def _leaves_only_at_its_start(
    leave_round: Any, account: TenantAccount, group: Group | None, number: int, *, has_started: bool
) -> None:
    if has_started:
        leave_round(account, group, number, has_started=True)


VECTOR_BUGS: dict[str, Plant] = {
    "a refused frontend never learns that there is room": wrap(Intake, "announce_room", lambda *_: None),
    "an error at one vector fails all requests that share it": wrap(Delivery, "fail_one", _fails_all),
    "inputs that a client drops keep their rounds": wrap(TenantAccount, "leave_round", _leaves_only_at_its_start),
    "vectors of a step are mixed up": wrap(vector_delivery, "_pack_each", lambda pack, *args: pack(*args)[::-1]),
}
