"""The tenant that the backend's scheduler charges for a request, and that tenant's weight."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import AsyncMock

import pytest

from penstock.frontend.access.admission import Admission, address_payer
from penstock.frontend.access.api_keys import ApiKey
from penstock.frontend.transport.exchange import Exchange
from tests.frontend.access.keys import BODY, COMPLETIONS
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, request_bytes, says

if TYPE_CHECKING:
    from penstock.frontend.settings import TenantBy


def payer_of(tenant_by: TenantBy, client: str | None, forwarded: str | None = None) -> bytes:
    headers = [] if forwarded is None else [(b"x-forwarded-for", forwarded.encode())]
    address = None if client is None else (client, 50000)
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers, "client": address}
    return address_payer(Exchange(scope, AsyncMock(), AsyncMock()), tenant_by)


def test_without_a_key_the_connections_address_pays() -> None:
    one, other = payer_of("address", "10.0.0.1"), payer_of("address", "10.0.0.2")
    assert len(one) == 16
    assert one != other
    assert payer_of("address", "10.0.0.1") == one
    assert payer_of("address", "::ffff:10.0.0.1") == one


def test_addresses_of_one_ipv6_network_are_one_payer() -> None:
    assert payer_of("address", "2001:db8::1") == payer_of("address", "2001:db8::ffff:1")
    assert payer_of("address", "2001:db8::1") != payer_of("address", "2001:db8:0:1::1")
    assert len(payer_of("address", "fe80::1%eth0")) == 16


def test_forwarded_address_counts_only_when_an_option_says_so() -> None:
    direct = payer_of("address", "10.0.0.1")
    assert payer_of("address", "10.0.0.1", "192.0.2.7") == direct
    assert payer_of("forwarded", "10.0.0.1", "192.0.2.7") == payer_of("address", "192.0.2.7")
    assert payer_of("forwarded", "10.0.0.1", "192.0.2.9, 192.0.2.7") == payer_of("address", "192.0.2.7")
    for useless in (None, "", "unknown", "192.0.2.7:80", "\u00e9"):
        assert payer_of("forwarded", "10.0.0.1", useless) == direct


def test_clients_without_an_address_are_one_payer() -> None:
    assert payer_of("none", "10.0.0.1", "192.0.2.7") == b""
    assert payer_of("address", None) == b""
    assert payer_of("forwarded", None) == b""


@pytest.mark.parametrize("keyed", [True, False])
async def test_payer_and_weight_reach_the_backend(keyed: bool) -> None:
    backend = FakeBackend(script=says("a"))
    keys = [ApiKey(b"sk", "alice", weight=2.5)] if keyed else []
    connection = ClientConnection(make_app(backend, admission=Admission(keys, tenant_by="address")))
    headers = [("authorization", "Bearer sk")] if keyed else []
    connection.send(request_bytes("POST", COMPLETIONS, BODY, headers))
    assert (await connection.response()).status == 200
    submitted = backend.last
    assert submitted.salt == (keys[0].salt if keyed else b"")
    assert submitted.tenant == (keys[0].salt if keyed else payer_of("address", "127.0.0.1"))
    assert submitted.weight == (2.5 if keyed else 1.0)
