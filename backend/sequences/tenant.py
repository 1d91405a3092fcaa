"""The account of one tenant: the service that it has received, and its open sequences."""

from __future__ import annotations


class TenantAccount:
    """One tenant's share of the device. Owned by the scheduler, which forgets it when it is idle."""

    __slots__ = ("key", "num_open", "num_passed", "num_running", "service", "weight")

    def __init__(self, key: bytes, weight: float) -> None:
        self.key = key
        self.weight = weight
        """Service that it is due in proportion to the other tenants'."""
        self.service = 0.0
        """Cost of the tokens computed for it, divided by its weight: the virtual token counter. It never decreases."""
        self.num_open = 0
        """Sequences that have not ended."""
        self.num_running = 0
        self.num_passed = 0
        """Waiting sequences that others have been allowed to pass, because they do not fit."""


NOBODY = TenantAccount(b"", 1.0)
"""The account of sequences that no scheduler knows."""
