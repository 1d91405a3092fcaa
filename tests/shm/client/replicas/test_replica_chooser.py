"""The states of a set of replicas, with clients that have no backend: who holds a stream, and where a request goes."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from penstock.shm.client import BackendClient, BackendUnavailable, GenerationRequest, ReplicaSet
from penstock.shm.client.replicas.replica_chooser import Replica, ReplicaChooser
from penstock.shm.memory.board import BackendBoard, FrontendBoard
from penstock.shm.memory.prefix_table import Owner, PrefixTable
from penstock.shm.messages import Adapter, ModelCard
from tests.shm.client.harness import GREEDY

NUM_REPLICAS = 3
KEY = bytes(range(32))


class FakeStream:
    def __init__(self, request: GenerationRequest) -> None:
        self.tokens = request.prompt_tokens()
        self.message = request.to_message(0, len(self.tokens))
        self.backend = ""


class FakeClient:
    """Holds streams as a client does. A backend's death, drain or hang makes it not ready."""

    def __init__(self) -> None:
        self.streams: dict[FakeStream, None] = {}
        self.board = FrontendBoard.private()
        self.backend_board = BackendBoard.private()
        self.backend_board.pid = 1
        self.ready = False
        self.model: ModelCard | None = None

    def submit(self, request: GenerationRequest) -> FakeStream:
        if not self.ready:
            raise BackendUnavailable("it holds none")
        stream = FakeStream(request)
        self.adopt([stream], backend_died=False)
        return stream

    @property
    def open_streams(self) -> list[FakeStream]:
        return list(self.streams)

    def give_streams(self, streams: list[FakeStream]) -> list[FakeStream]:
        for stream in streams:
            self.end(stream)
        return streams

    def adopt(self, streams: list[FakeStream], *, backend_died: bool) -> None:
        self.streams |= dict.fromkeys(streams)
        self.board.requests_open = len(self.streams)

    def end(self, stream: FakeStream) -> None:
        del self.streams[stream]
        self.board.requests_open = len(self.streams)


class ReplicaStates(RuleBasedStateMachine):
    streams = Bundle("streams")

    @initialize()
    def start(self) -> None:
        self.set = ReplicaSet([Path(f"/{n}") for n in range(NUM_REPLICAS)], prefixes=PrefixTable.private(KEY))
        self.clients = [FakeClient() for _ in range(NUM_REPLICAS)]
        for replica, client in zip(self.set.replicas, self.clients, strict=True):
            replica.client = cast("BackendClient", client)
        self.open: set[FakeStream] = set()

    @rule(number=st.integers(0, NUM_REPLICAS - 1))
    def become_ready(self, number: int) -> None:
        self.clients[number].ready = True
        self.set._look()

    @rule(number=st.integers(0, NUM_REPLICAS - 1))
    def die(self, number: int) -> None:
        client = self.clients[number]
        client.ready = False
        client.backend_board.pid += 1
        self.set._relieve(self.set.replicas[number], backend_died=True)

    @rule(number=st.integers(0, NUM_REPLICAS - 1))
    def drain_or_hang(self, number: int) -> None:
        self.clients[number].ready = False
        self.set._look()

    @rule(target=streams, prompt=st.integers(0, 3), length=st.sampled_from([1, 70, 200]), may_share=st.booleans())
    def submit(self, prompt: int, length: int, may_share: bool) -> Any:
        request = GenerationRequest([prompt] * length, 8, GREEDY, may_share=may_share)
        before = {id(client): len(client.streams) for client in self.clients if client.ready}
        twins = [
            one for one in self.open if may_share and one.message.may_share and one.tokens == request.prompt_tokens()
        ]
        try:
            stream = cast("FakeStream", self.set.submit(request))
        except BackendUnavailable:
            assert not before
            return multiple()
        self.open.add(stream)
        holder = self.holder_of(stream)
        if any(self.holder_of(twin) is holder for twin in twins):
            return stream
        assert before[id(holder)] <= 1.25 * sum(before.values()) / len(before) + 8
        return stream

    @rule(stream=consumes(streams))
    def end(self, stream: FakeStream) -> None:
        self.holder_of(stream).end(stream)
        self.open.remove(stream)

    def holder_of(self, stream: FakeStream) -> FakeClient:
        (holder,) = (client for client in self.clients if stream in client.streams)
        return holder

    @invariant()
    def each_stream_is_at_one_client_which_is_ready_if_any_is(self) -> None:
        if not hasattr(self, "set"):
            return
        held = [stream for client in self.clients for stream in client.streams]
        assert len(held) == len(set(held)) == len(self.open)
        assert set(held) == self.open
        for number, client in enumerate(self.clients):
            assert all(stream.backend == str(number + 1) for stream in client.streams)
            if any(other.ready for other in self.clients):
                assert client.ready or not client.streams


ReplicaStates.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
test_replica_states = ReplicaStates.TestCase


def test_prompts_share_names_as_far_as_they_are_equal_and_tenants_share_none() -> None:
    table = PrefixTable.private(KEY)
    one, other = array("i", range(200)), array("i", [*range(130), *range(70)])
    names = table.names(one, b"")
    assert len(names) == 3
    assert [a == b for a, b in zip(names, table.names(other, b""), strict=True)] == [True, True, False]
    assert not set(names) & set(table.names(one, b"salt"))
    assert not set(names) & set(PrefixTable.private(bytes(32)).names(one, b""))
    assert len(table.names(array("i", bytes(4 * 200_000)), b"")) == 78


def test_workers_see_each_others_entries_and_another_prefix_may_replace_them() -> None:
    fd = PrefixTable.create_fd(KEY)
    first, second = PrefixTable.attach(fd), PrefixTable.attach(fd)
    os.close(fd)
    (name,) = first.names(array("i", range(64)), b"")
    assert second.find(name) is None
    first.note(name, Owner(2, 17))
    assert second.find(name) == Owner(2, 17)
    assert second.find(name ^ 1 << 40) is None
    second.note(name ^ 1 << 40, Owner(1, 17))
    assert first.find(name) is None


class DigestOf:
    """A table that has each prompt's beginning of so many tokens."""

    page_size_tokens = 64

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def num_cached_tokens(self, names: list[int]) -> int:
        return min(self.num_tokens, 64 * len(names))

    def close(self) -> None:
        """It has no memory."""


@pytest.mark.parametrize(
    ("cached", "num_open", "sent_to", "expected"),
    [
        ((0, 64, 128), (0, 0, 0), 0, 2),  # what is cached counts, not what was sent
        ((0, 128, 128), (0, 0, 5), 2, 2),  # of those with the same, the one that it was sent to
        ((128, 128, 64), (3, 0, 0), 2, 1),  # and else the one with less load
        ((64, 0, 128), (0, 0, 40), 1, 0),  # one with far too much load is none of them
        ((0, 0, 0), (0, 0, 5), 2, 2),  # while nothing is cached, it may be computed where it was sent
        ((0, 0, 0), (5, 0, 5), None, 1),
    ],
)
def test_prompt_goes_where_most_of_it_is_cached(
    cached: tuple[int, ...], num_open: tuple[int, ...], sent_to: int | None, expected: int
) -> None:
    table = PrefixTable.private(KEY)
    replicas = [Replica(number, str(number), cast("BackendClient", FakeClient())) for number in range(NUM_REPLICAS)]
    for replica, num_tokens, count in zip(replicas, cached, num_open, strict=True):
        client = cast("FakeClient", replica.client)
        client.backend_board._digest = cast("Any", DigestOf(num_tokens))
        client.backend_board.show_totals(1, [count, *[0] * (len(FrontendBoard.fields) - 2)])
    request = GenerationRequest([7] * 200, 8, GREEDY)
    tokens = request.prompt_tokens()
    if sent_to is not None:
        for name in table.names(tokens, b""):
            table.note(name, replicas[sent_to].owner)
    assert ReplicaChooser(table).place(replicas, request.to_message(0, len(tokens)), tokens) is replicas[expected]


def test_request_goes_to_a_replica_with_its_adapter() -> None:
    """However much of the prompt others have cached. If none has it, one refuses the request."""
    card = ModelCard("m", "/m", 0, 8, 64, 1)
    with_adapter = msgspec.structs.replace(card, adapters=(Adapter("sql", "id-1", 4),))
    clients = [FakeClient() for _ in range(NUM_REPLICAS)]
    for client, model in zip(clients, (card, with_adapter, None), strict=True):
        client.model = model
        client.backend_board._digest = cast("Any", DigestOf(0 if model is with_adapter else 128))
    replicas = [Replica(number, str(number), cast("BackendClient", client)) for number, client in enumerate(clients)]
    chooser = ReplicaChooser(PrefixTable.private(KEY))
    for adapter, expected in (("id-1", replicas[1:2]), ("", replicas[::2]), ("id-2", replicas)):
        request = GenerationRequest([7] * 200, 8, GREEDY, adapter=adapter)
        assert chooser.place(replicas, request.to_message(0, 200), request.prompt_tokens()) in expected


@pytest.mark.parametrize("others_open", [0, 30])
def test_load_counts_other_frontends_and_what_this_one_has_added_since(others_open: int) -> None:
    client = FakeClient()
    replica = Replica(0, "1", cast("BackendClient", client))
    client.backend_board.show_totals(1, [others_open, *[0] * (len(FrontendBoard.fields) - 2)])
    assert replica.load == others_open
    client.board.requests_open = 5
    assert replica.load == others_open + 5
    client.backend_board.show_totals(1, [others_open + 5, *[0] * (len(FrontendBoard.fields) - 2)])
    assert replica.load == others_open + 5
