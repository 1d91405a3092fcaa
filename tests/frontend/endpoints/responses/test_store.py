"""The store of responses keeps its bounds under any sequence of operations."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.frontend.endpoints.responses.store import ResponseStore, StoredResponse

MAX_BYTES = 20_000
MAX_RESPONSES = 6
MAX_IDLE_S = 10.0
TENANTS = st.sampled_from([b"", b"a", b"b"])
IDS = st.sampled_from([f"resp_{number}" for number in range(8)])


def response(response_id: str, num_bytes: int) -> StoredResponse:
    return StoredResponse(response_id, b"x" * num_bytes, b"", (), 0)


class Store(RuleBasedStateMachine):
    """Compares the store with a model made of plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.store = ResponseStore(
            max_bytes=MAX_BYTES, max_responses=MAX_RESPONSES, max_idle_s=MAX_IDLE_S, clock=lambda: self.now_s
        )
        self.kept: OrderedDict[tuple[bytes, str], tuple[int, float]] = OrderedDict()
        """Responses with size and last use, least recently used first."""

    def expire(self) -> None:
        for key, (_, used_s) in list(self.kept.items()):
            if used_s < self.now_s - MAX_IDLE_S:
                del self.kept[key]

    def bytes_of(self, tenant: bytes) -> int:
        return sum(size for (owner, _), (size, _) in self.kept.items() if owner == tenant)

    @rule(tenant=TENANTS, response_id=IDS, num_bytes=st.integers(0, MAX_BYTES + 100))
    def put(self, tenant: bytes, response_id: str, num_bytes: int) -> None:
        stored = response(response_id, num_bytes)
        self.store.put(tenant, stored)
        self.kept.pop((tenant, response_id), None)
        self.expire()
        self.kept[tenant, response_id] = (stored.num_bytes, self.now_s)
        while sum(size for size, _ in self.kept.values()) > MAX_BYTES or len(self.kept) > MAX_RESPONSES:
            held = {owner: self.bytes_of(owner) for owner, _ in self.kept}
            largest = [owner for owner, size in held.items() if size == max(held.values())]
            oldest = [next(key for key in self.kept if key[0] == owner) for owner in largest]
            dropped = [key for key in oldest if key not in self.in_store()]
            assert dropped, "the evicted response is not the oldest of the largest tenant"
            del self.kept[dropped[0]]
        assert set(self.kept) == self.in_store()

    @rule(tenant=TENANTS, response_id=IDS)
    def get(self, tenant: bytes, response_id: str) -> None:
        self.expire()
        found = self.store.get(tenant, response_id)
        assert (found is not None) == ((tenant, response_id) in self.kept)
        if found is not None:
            assert found.response_id == response_id
            size, _ = self.kept.pop((tenant, response_id))
            self.kept[tenant, response_id] = (size, self.now_s)

    @rule(tenant=TENANTS, response_id=IDS)
    def remove(self, tenant: bytes, response_id: str) -> None:
        self.expire()
        assert self.store.remove(tenant, response_id) == (self.kept.pop((tenant, response_id), None) is not None)

    @rule(seconds=st.floats(0.0, 6.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def in_store(self) -> set[tuple[bytes, str]]:
        return {(tenant, key) for tenant, kept in self.store._tenants.items() for key in kept}

    @invariant()
    def stays_within_its_bounds(self) -> None:
        assert self.store.num_bytes <= MAX_BYTES
        assert len(self.store) <= MAX_RESPONSES
        kept = self.store._tenants.values()
        assert self.store.num_bytes == sum(entry.num_bytes for of_tenant in kept for entry in of_tenant.values())


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


def test_response_larger_than_the_store_is_not_kept() -> None:
    store = ResponseStore(max_bytes=2000, max_responses=5, max_idle_s=10.0)
    store.put(b"", response("small", 10))
    store.put(b"", response("large", 5000))
    assert store.get(b"", "large") is None
    assert store.num_bytes <= 2000


def test_stores_make_different_ids() -> None:
    stores = [ResponseStore(max_bytes=0, max_responses=0, max_idle_s=1.0) for _ in range(2)]
    assert stores[0].tag != stores[1].tag
