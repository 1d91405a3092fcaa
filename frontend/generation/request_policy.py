"""The scheduling of a request: what it may share, whether it may be coalesced, its priority and its deadline."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from penstock.frontend.schemas.generation import MAX_TIMEOUT_MS, SchedulingBody
from penstock.frontend.transport.errors import invalid, shorten
from penstock.frontend.transport.exchange import Exchange

_CACHE_SALT_CONTEXT = b"cache_salt"
_COALESCE_HEADER = "X-Penstock-Coalesce"
_TIMEOUT_HEADER = "X-Request-Timeout-Ms"
_REFUSE_LATE_HEADER = "X-Penstock-Refuse-Late"
POLICY_HEADERS = tuple(header.lower().encode() for header in (_COALESCE_HEADER, _TIMEOUT_HEADER, _REFUSE_LATE_HEADER))
"""The headers that a policy is read from."""


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """Lower priority numbers run sooner. deadline_s is a time of time.monotonic(); None is no deadline."""

    salt: bytes
    """Requests share cached pages and sequences only with those of the same salt."""
    tenant: bytes
    """The tenant that the backend's scheduler charges."""
    weight: float
    may_join: bool
    priority: int
    deadline_s: float | None
    refuses_late: bool = False
    """Refuse the request if it should miss its deadline. Pooled requests are not predicted."""


def read_request_policy(exchange: Exchange, body: SchedulingBody) -> RequestPolicy:
    """Read the policy from headers and body. The time limit starts when the request arrives here.

    Raises ApiError naming the wrong header.
    """
    may_join = _switch(exchange, _COALESCE_HEADER, default=True)
    refuses_late = _switch(exchange, _REFUSE_LATE_HEADER, default=False)
    limits_ms = [limit for limit in (_header_timeout_ms(exchange), body.timeout_ms) if limit is not None]
    deadline_s = exchange.received_s + min(limits_ms) / 1000 if limits_ms else None
    if refuses_late and deadline_s is None:
        invalid(_REFUSE_LATE_HEADER, f"needs a time limit: timeout_ms or {_TIMEOUT_HEADER}")
    payer, weight, salt = exchange.payer, exchange.weight, _salt(exchange.tenant, body.cache_salt)
    return RequestPolicy(salt, payer, weight, may_join, body.priority or 0, deadline_s, refuses_late)


def _salt(tenant: bytes, cache_salt: str | None) -> bytes:
    """Return the salt of a request. It is keyed by the tenant, so no cache_salt gives another tenant's salt."""
    if cache_salt is None:
        return tenant
    return blake2b(cache_salt.encode(), digest_size=16, key=tenant, person=_CACHE_SALT_CONTEXT).digest()


def _switch(exchange: Exchange, name: str, *, default: bool) -> bool:
    value = exchange.header(name.lower().encode())
    if value is None:
        return default
    if value.lower() not in (b"on", b"off"):
        invalid(name, f'must be "on" or "off", got {_shown(value)}')
    return value.lower() == b"on"


def _header_timeout_ms(exchange: Exchange) -> int | None:
    value = exchange.header(_TIMEOUT_HEADER.lower().encode())
    if value is None:
        return None
    # isdigit() of bytes is ASCII only. The length is checked first, because int() of a long number is slow.
    if not (value.isdigit() and len(value) <= 8 and 1 <= int(value) <= MAX_TIMEOUT_MS):
        invalid(_TIMEOUT_HEADER, f"must be a number of milliseconds from 1 to {MAX_TIMEOUT_MS}, got {_shown(value)}")
    return int(value)


def _shown(value: bytes) -> str:
    return shorten(value.decode("latin-1"))
