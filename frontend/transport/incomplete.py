"""Bounds the unfinished input of clients: heads and bodies of requests, and TLS handshakes.

Their number is limited, in all and for each client address. Beyond a limit a new one displaces the oldest: an honest
client has completed its own long before.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

Item = TypeVar("Item")

MIN_AGE_S = 1.0
"""Younger items are not displaced, so that a burst of clients does not displace its own."""
MAX_INCOMPLETE_BYTES = 256 << 20
"""Limit of the bytes of incomplete bodies that a worker holds."""
_ADDRESS_PART = 4
"""One address may have a quarter of the items."""
_IPV6_NETWORK_BYTES = 8


def network_of(host: str) -> bytes | None:
    """Return the bytes of an IPv4 address, or of an IPv6 address's network of 64 bits; None if the text is neither.

    A subscriber owns a whole IPv6 network, so further addresses within it cost nothing.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return address.packed[:_IPV6_NETWORK_BYTES] if address.ipv4_mapped is None else address.ipv4_mapped.packed
    return address.packed


_network_of_peer = lru_cache(1024)(network_of)


def client_network(peer: Any) -> bytes:
    """Return the network of a connection's peer name; empty for a Unix socket, whose clients all count as one."""
    return (_network_of_peer(str(peer[0])) or b"") if isinstance(peer, tuple) and peer else b""


class Displaceable(Protocol):
    """A request whose body is being read."""

    def displace(self) -> None:
        """Stop reading: another request needs the place."""


class Incomplete(Generic[Item]):
    """Items by client address, the oldest first. Times are seconds of the caller's clock."""

    def __init__(self, limit: int, displace: Callable[[Item], None]) -> None:
        """displace is called with an item that was removed for a new one."""
        self._limit = limit
        self._limit_of_address = max(1, limit // _ADDRESS_PART)
        self._displace = displace
        self._address_of: dict[Item, bytes] = {}
        self._since_s: dict[bytes, dict[Item, float]] = {}
        """By address, without empty ones."""

    def __len__(self) -> int:
        return len(self._address_of)

    def __contains__(self, item: Item) -> bool:
        return item in self._address_of

    def add(self, item: Item, address: bytes, now_s: float) -> None:
        """Add an item. If it was added before, it keeps its age; if there are too many now, another is displaced."""
        if item in self._address_of:
            return
        self._address_of[item] = address
        of_address = self._since_s.setdefault(address, {})
        of_address[item] = now_s
        if len(of_address) > self._limit_of_address:
            self._displace_oldest(of_address, now_s, MIN_AGE_S)
        elif len(self) > self._limit:
            self.make_room(address, now_s)

    def discard(self, item: Item) -> None:
        address = self._address_of.pop(item, None)
        if address is not None:
            of_address = self._since_s[address]
            del of_address[item]
            if not of_address:
                del self._since_s[address]

    def older(self, since_s: float) -> list[Item]:
        """Return the items that were added at this time or before."""
        return [item for of_address in self._since_s.values() for item, at_s in of_address.items() if at_s <= since_s]

    def make_room(self, address: bytes, now_s: float) -> bool:
        """Displace the oldest item of the address that has the most, for a new item of the given address.

        Return False if it is younger than MIN_AGE_S. Age does not protect an address that has more than its share from
        a new item of another address.
        """
        if not self._since_s:
            return False
        crowd = max(self._since_s.values(), key=len)
        is_other = crowd is not self._since_s.get(address)
        has_too_many = len(crowd) >= self._limit_of_address
        return self._displace_oldest(crowd, now_s, 0.0 if is_other and has_too_many else MIN_AGE_S)

    def displace_oldest(self, now_s: float) -> bool:
        """Displace the oldest item, however young, of the address that has most. Return False if there is none."""
        return bool(self._since_s) and self._displace_oldest(max(self._since_s.values(), key=len), now_s, 0.0)

    def _displace_oldest(self, of_address: dict[Item, float], now_s: float, min_age_s: float) -> bool:
        item, since_s = next(iter(of_address.items()))
        if now_s - since_s < min_age_s:
            return False
        self.discard(item)
        self._displace(item)
        return True


class IncompleteBodies:
    """The requests of one worker whose bodies are being read. Both their number and their bytes are bounded."""

    def __init__(self, limit: int, max_bytes: int = MAX_INCOMPLETE_BYTES) -> None:
        self._requests = Incomplete[Displaceable](limit, self._end)
        self._max_bytes = max_bytes
        self._num_bytes: dict[Displaceable, int] = {}
        self._total_bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Displaceable) -> bool:
        return request in self._requests

    def add(self, request: Displaceable, address: bytes, now_s: float) -> None:
        self._requests.add(request, address, now_s)

    def hold(self, request: Displaceable, num_bytes: int, now_s: float) -> None:
        """Note how many bytes of a request's body are held. Beyond the limit for all bodies the oldest is displaced."""
        self._total_bytes += num_bytes - self._num_bytes.get(request, 0)
        self._num_bytes[request] = num_bytes
        while self._total_bytes > self._max_bytes and self._requests.displace_oldest(now_s):
            pass

    def discard(self, request: Displaceable) -> None:
        self._requests.discard(request)
        self._total_bytes -= self._num_bytes.pop(request, 0)

    def _end(self, request: Displaceable) -> None:
        self.discard(request)
        request.displace()
