"""A row for every resource that must be given back, with its owner, from acquisition to release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class LedgerError(Exception):
    """A resource was acquired twice, or is still held when it must not be. Always a bug of ours."""


class Ledger:
    """Rows (kind, key) → owner. Releasing is idempotent: only the first release of a row returns True."""

    def __init__(self) -> None:
        self._owners: dict[tuple[str, Hashable], Hashable] = {}
        self._counts: Counter[str] = Counter()

    def acquire(self, kind: str, key: Hashable, owner: Hashable) -> None:
        """Raises LedgerError when the row is held already."""
        row = (kind, key)
        if row in self._owners:
            raise LedgerError(f"{kind} {key} is held by {self._owners[row]} and was acquired by {owner}")
        self._owners[row] = owner
        self._counts[kind] += 1

    def release(self, kind: str, key: Hashable) -> bool:
        if self._owners.pop((kind, key), None) is None:
            return False
        self._counts[kind] -= 1
        return True

    def release_owner(self, owner: Hashable) -> int:
        """Release every row of an owner that has ended. Returns their number."""
        rows = [row for row, holder in self._owners.items() if holder == owner]
        for kind, key in rows:
            self.release(kind, key)
        return len(rows)

    def count(self, kind: str) -> int:
        return self._counts[kind]

    def balance(self) -> dict[str, int]:
        """Rows held, by kind; kinds without rows are absent."""
        return {kind: count for kind, count in self._counts.items() if count}

    def check(self, **expected: int) -> None:
        """Raises LedgerError unless exactly these counts are held, and nothing else."""
        needed = {kind: count for kind, count in expected.items() if count}
        if self.balance() != needed:
            held = ", ".join(f"{kind} {key} of {owner}" for (kind, key), owner in list(self._owners.items())[:8])
            raise LedgerError(f"expected {needed or 'nothing'} to be held, found {self.balance() or 'nothing'}: {held}")
