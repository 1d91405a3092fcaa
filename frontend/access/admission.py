"""Decides who may send requests, from which web pages and how many, before a request's body is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from hashlib import blake2b

from penstock.frontend.access.api_keys import ApiKey, Keyring
from penstock.frontend.access.cors import Cors
from penstock.frontend.access.hosts import AllowedHosts
from penstock.frontend.access.rate_limits import RateLimiter
from penstock.frontend.access.usage_table import UsageTable
from penstock.frontend.settings import EngineView, TenantBy
from penstock.frontend.transport.errors import ApiError, ErrorKind
from penstock.frontend.transport.exchange import Exchange
from penstock.frontend.transport.incomplete import network_of

_PAYER_BYTES = 16


def address_payer(exchange: Exchange, tenant_by: TenantBy) -> bytes:
    """Return 16 bytes that identify the client in every worker, or b"" if it shares the tenant of all such clients.

    `forwarded` reads the last address of X-Forwarded-For, which the nearest proxy has appended; a client can forge
    those before it. If the last is no address, the connection's counts. A Unix socket has none.
    """
    address = None
    if tenant_by == "forwarded":
        forwarded = (exchange.header(b"x-forwarded-for") or b"").rpartition(b",")[2]
        address = network_of(forwarded.strip().decode("latin-1"))
    client = exchange.scope.get("client")
    if address is None and tenant_by != "none" and client is not None:
        address = network_of(client[0])
    return b"" if address is None else blake2b(address, digest_size=_PAYER_BYTES).digest()


class Admission:
    """The checks of one worker. The keys can be replaced while requests run; earlier use of a key still counts."""

    def __init__(
        self,
        keys: Iterable[ApiKey] = (),
        *,
        cors_origins: Iterable[str] = (),
        allowed_hosts: Iterable[str] = ("*",),
        usage: UsageTable | None = None,
        tenant_by: TenantBy = "none",
        admin_key: str | None = None,
        engine_view: EngineView | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """allowed_hosts and tenant_by matter only while there are no keys.

        All workers count in usage; without it, this worker counts alone. Raises ValueError for duplicate or too many
        keys.
        """
        self._keyring = Keyring(keys)
        self._admin = Keyring([] if admin_key is None else [ApiKey(admin_key.encode(), "admin")])
        self._rate_limiter = RateLimiter(usage or UsageTable.alone(), self._keyring.limited, clock)
        self._hosts = AllowedHosts(allowed_hosts)
        self._tenant_by = tenant_by
        self._engine_view = engine_view
        self.cors = Cors(cors_origins)

    def set_keys(self, keys: Iterable[ApiKey]) -> None:
        """Replace the keys; requests that run continue. Raises ValueError, and then the old keys stay."""
        keyring = Keyring(keys)
        self._rate_limiter.set_keys(keyring.limited)
        self._keyring = keyring

    def check_host(self, exchange: Exchange) -> None:
        """Reject DNS rebinding. Skipped when keys are set, because a foreign page has no key. Raises ApiError."""
        if not self._keyring:
            self._hosts.check(exchange)

    def identify(self, exchange: Exchange) -> None:
        """Note on the exchange which key sent the request and which tenant pays for it. Raises ApiError."""
        key = self._keyring.check(exchange)
        if key is None:
            exchange.payer = address_payer(exchange, self._tenant_by)
        else:
            exchange.tenant = exchange.payer = key.salt
            exchange.key_name, exchange.weight, exchange.is_admin = key.name, key.weight, key.is_admin

    def check_admin(self, exchange: Exchange) -> None:
        """Raises ApiError unless the request has the admin key. Without an admin key nobody is the operator."""
        if not self._admin:
            message = "this server has no admin key; start it with --admin-key or PENSTOCK_ADMIN_KEY"
            raise ApiError(ErrorKind.BAD_KEY, message)
        self._admin.check(exchange)

    def check_operator(self, exchange: Exchange) -> None:
        """Raises ApiError unless the request has the admin key, or an API key with admin=yes."""
        if self._admin and self._admin.find(exchange) is not None:
            return
        self.identify(exchange)
        if not exchange.is_admin:
            message = "this needs the server's --admin-key, or an API key with admin=yes in its --api-key-file"
            raise ApiError(ErrorKind.NO_ADMIN, message)

    def identify_viewer(self, exchange: Exchange) -> bool:
        """Like `identify`, but the admin key is also a key. Return whether the viewer may see all requests."""
        if self._admin and self._admin.find(exchange) is not None:
            return True
        self.identify(exchange)
        view = self._engine_view or ("own" if self._keyring else "all")
        return view == "all" or exchange.is_admin

    def admit(self, exchange: Exchange) -> None:
        """Count the request against its key's limits until the exchange is finished. Raises ApiError."""
        account = self._rate_limiter.account(exchange.tenant)
        if account is not None:
            exchange.claim = account.admit()

    def readmit(self, exchange: Exchange) -> None:
        """Count a request that a worker admitted before it died. No limit refuses it again."""
        account = self._rate_limiter.account(exchange.tenant)
        if account is not None:
            exchange.claim = account.readmit()
