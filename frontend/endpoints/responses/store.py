"""Keeps finished responses for a while in this process, by tenant, bounded by bytes, number and age."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.frontend.schemas.chat import ChatMessage

_OVERHEAD_BYTES = 1024
"""Added to each response's size for what its objects take."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response_id: str
    body: bytes
    """The response object as JSON."""
    input_items: bytes
    """The request's items as JSON: decoded, a thousand empty ones would take many times their counted size."""
    messages: tuple[ChatMessage, ...]
    """The conversation including this answer, without instructions: each request has its own."""
    num_message_bytes: int
    """Size of `messages`, counted in full for each response of a conversation: any of them keeps all in memory."""
    is_background: bool = False
    events: Sequence[bytes] | None = None
    """The stream's events, if it can be streamed again."""

    @property
    def num_bytes(self) -> int:
        own = _OVERHEAD_BYTES + len(self.body) + len(self.input_items)
        return own + self.num_message_bytes + sum(map(len, self.events or ()))


@dataclass(slots=True)
class _Kept:
    response: StoredResponse
    num_bytes: int
    used_s: float


class ResponseStore:
    """When a bound is exceeded, evicts the least recently used response of the tenant with the most bytes."""

    def __init__(
        self, *, max_bytes: int, max_responses: int, max_idle_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A response that is unused for max_idle_s is dropped."""
        self.tag = secrets.token_hex(4)
        """Part of the ids of this store's responses. It tells another process that the response is not its own."""
        self.num_bytes = 0
        self.max_idle_s = max_idle_s
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._clock = clock
        self._tenants: dict[bytes, OrderedDict[str, _Kept]] = {}
        self._bytes_of: dict[bytes, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def put(self, tenant: bytes, response: StoredResponse) -> None:
        self.remove(tenant, response.response_id)
        self._expire()
        kept = _Kept(response, response.num_bytes, self._clock())
        self._tenants.setdefault(tenant, OrderedDict())[response.response_id] = kept
        self._count(tenant, kept.num_bytes)
        while self.num_bytes > self._max_bytes or len(self) > self._max_responses:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            self._drop(largest, next(iter(self._tenants[largest])))

    def get(self, tenant: bytes, response_id: str) -> StoredResponse | None:
        self._expire()
        of_tenant = self._tenants.get(tenant)
        kept = None if of_tenant is None else of_tenant.get(response_id)
        if of_tenant is None or kept is None:
            return None
        kept.used_s = self._clock()
        of_tenant.move_to_end(response_id)
        return kept.response

    def remove(self, tenant: bytes, response_id: str) -> bool:
        """Return whether the store had it."""
        self._expire()
        is_kept = response_id in self._tenants.get(tenant, {})
        if is_kept:
            self._drop(tenant, response_id)
        return is_kept

    def _expire(self) -> None:
        """Drop responses that are unused for too long. Each tenant's are in order of last use."""
        oldest_s = self._clock() - self.max_idle_s
        for tenant in list(self._tenants):
            while (of_tenant := self._tenants.get(tenant)) and next(iter(of_tenant.values())).used_s < oldest_s:
                self._drop(tenant, next(iter(of_tenant)))

    def _drop(self, tenant: bytes, response_id: str) -> None:
        of_tenant = self._tenants[tenant]
        self._count(tenant, -of_tenant.pop(response_id).num_bytes)
        if not of_tenant:
            del self._tenants[tenant], self._bytes_of[tenant]

    def _count(self, tenant: bytes, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + num_bytes
