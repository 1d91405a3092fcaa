"""The ledger records what is held and who holds it."""

from __future__ import annotations

import pytest

from penstock.shm.memory.ledger import Ledger, LedgerError


def test_ledger_records_owners() -> None:
    ledger = Ledger()
    ledger.acquire("slot", 1, "a")
    ledger.acquire("slot", 2, "b")
    with pytest.raises(LedgerError, match="held by a"):
        ledger.acquire("slot", 1, "b")
    ledger.check(slot=2)
    assert ledger.release("slot", 1)
    assert not ledger.release("slot", 1)
    with pytest.raises(LedgerError, match="slot 2 of b"):
        ledger.check()
    assert ledger.release_owner("b") == 1
    assert ledger.release_owner("b") == 0
    ledger.check()
    assert ledger.balance() == {}
