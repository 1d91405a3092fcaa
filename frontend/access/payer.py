"""Chooses the tenant that the backend's scheduler charges for a request without an API key."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from penstock.frontend.transport.incomplete import network_of

if TYPE_CHECKING:
    from penstock.frontend.settings import TenantBy
    from penstock.frontend.transport.exchange import Exchange


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
