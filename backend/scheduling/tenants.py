"""Charges tenants for computed tokens: each has a virtual token counter, its `service`.

After Sheng et al., Fairness in Serving Large Language Models (arXiv 2401.00588). A tenant's counter grows by the cost
of each token computed for it, divided by its weight. The waiting tenant with the lowest counter goes first. When a
tenant begins to wait, its counter is raised to the lowest counter of the waiting tenants. So an idle tenant gains no
advantage over the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.tenant_account import TenantAccount

PREFILL_COST, DECODE_COST = 1.0, 2.0
"""Cost of a prompt's token and of a generated one, as in the paper and in most price lists."""
_MAX_IDLE = 4096
"""Idle accounts to remember. Beyond that, those with the least service are forgotten."""


class Tenants:
    """The accounts of tenants with open sequences, and of idle tenants with more service than those that wait.

    With one account nothing is charged: there is no other to compare it with.
    """

    def __init__(self) -> None:
        self._accounts: dict[bytes, TenantAccount] = {}
        self._idle: list[tuple[float, int, TenantAccount]] = []
        """(service, tie-breaker, account), least service first; entries of accounts in use again are stale."""
        self._num_idled = 0
        self._total_weight = 0.0
        """The sum over accounts with open sequences."""
        self.highest_service = 0.0

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def are_several(self) -> bool:
        return len(self._accounts) > 1

    @property
    def has_idle(self) -> bool:
        return bool(self._idle)

    def open(self, key: bytes, weight: float) -> TenantAccount:
        """Return the tenant's account, which pays for one more sequence until `close`."""
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = TenantAccount(key, weight)
        if account.num_open:
            self._total_weight -= account.weight
        account.weight = weight
        self._total_weight += weight
        account.num_open += 1
        return account

    def close(self, account: TenantAccount) -> None:
        account.num_open -= 1
        if not account.num_open:
            self._total_weight -= account.weight
            self._num_idled += 1
            heapq.heappush(self._idle, (account.service, self._num_idled, account))

    def forget_idle(self, floor: float) -> None:
        """Forget idle accounts with no more service than floor. If they come back, they start with at least floor."""
        while self._idle and (self._idle[0][0] <= floor or len(self._idle) > _MAX_IDLE):
            service, _, account = heapq.heappop(self._idle)
            if not account.num_open and account.service == service and self._accounts.get(account.key) is account:
                del self._accounts[account.key]

    def charge(self, account: TenantAccount, cost: float) -> None:
        account.service = service = account.service + cost / account.weight
        self.highest_service = max(self.highest_service, service)

    def charge_decodes(self, sequences: Iterable[Sequence]) -> None:
        """Charge one generated token of each sequence."""
        counts: dict[TenantAccount, int] = {}
        for sequence in sequences:
            account = sequence.account
            counts[account] = counts.get(account, 0) + 1
        for account, count in counts.items():
            self.charge(account, count * DECODE_COST)

    def share_of(self, account: TenantAccount) -> float:
        """The part of slots and pages that an account with open sequences may claim, from 0 to 1."""
        return account.weight / self._total_weight

    def find(self, key: bytes, weight: float) -> TenantAccount:
        """The tenant's account, or a new account like the one that it would get."""
        return self._accounts.get(key) or TenantAccount(key, weight)

    def num_waiting_of(self, key: bytes) -> int:
        """The tenant's sequences that have not ended and do not run."""
        account = self._accounts.get(key)
        return 0 if account is None else account.num_open - account.num_running

    def share_with(self, key: bytes, weight: float) -> float:
        """The part that the tenant may claim, or could claim with a sequence of this weight."""
        account = self._accounts.get(key)
        if account is not None and account.num_open:
            return self.share_of(account)
        return weight / (self._total_weight + weight)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises RuntimeError unless the accounts count exactly these open sequences."""
        num_open: dict[TenantAccount, int] = {}
        for sequence in sequences:
            num_open[sequence.account] = num_open.get(sequence.account, 0) + 1
        if num_open != {account: account.num_open for account in self._accounts.values() if account.num_open}:
            raise RuntimeError("the tenants' accounts and the open sequences do not match")
        total = sum(account.weight for account in num_open)
        if abs(total - self._total_weight) > 1e-6 * (1.0 + total):
            raise RuntimeError(f"open accounts weigh {total}, {self._total_weight} are counted")
        idle = {account for _, _, account in self._idle}
        if any(not account.num_open and account not in idle for account in self._accounts.values()):
            raise RuntimeError("an idle account cannot be forgotten")
