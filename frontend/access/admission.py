"""Who may ask, from which pages, and how much: what is looked at before a request's body is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.frontend.access.api_keys import Keyring
from penstock.frontend.access.cors import Cors
from penstock.frontend.access.hosts import Hosts
from penstock.frontend.access.rate_limits import RateLimiter, UsagePage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.frontend.access.api_keys import ApiKey
    from penstock.frontend.transport.exchange import Exchange


class Admission:
    """Of one worker. The keys can be replaced while requests run; what they have used stays."""

    def __init__(
        self,
        keys: Iterable[ApiKey] = (),
        *,
        cors_origins: Iterable[str] = (),
        allowed_hosts: Iterable[str] = ("*",),
        page: UsagePage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """allowed_hosts matter while there are no keys. page is where the workers count together; without one this
        worker counts alone. Raises ValueError for keys that cannot be."""
        self._keyring = Keyring(keys)
        self._quotas = RateLimiter(page or UsagePage.private(), self._keyring.limited, clock)
        self._hosts = Hosts(allowed_hosts)
        self.cors = Cors(cors_origins)

    def set_keys(self, keys: Iterable[ApiKey]) -> None:
        """Raises ValueError; the old keys stay then. Requests that run go on."""
        self._keyring = Keyring(keys)
        self._quotas.set_keys(self._keyring.limited)

    def check_host(self, exchange: Exchange) -> None:
        """Raises ApiError for a request that a page may have made a browser send which takes us for the page's server.
        Where there are keys it has none."""
        if not self._keyring:
            self._hosts.check(exchange)

    def identify(self, exchange: Exchange) -> None:
        """Notes whose request it is. Raises ApiError."""
        key = self._keyring.check(exchange)
        if key is not None:
            exchange.tenant, exchange.key_name = key.salt, key.name

    def admit(self, exchange: Exchange) -> None:
        """Counts the request against its key's limits, until the exchange is finished. Raises ApiError."""
        account = self._quotas.account(exchange.tenant)
        if account is not None:
            account.admit()
            exchange.account = account
