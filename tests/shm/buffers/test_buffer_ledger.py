"""Clients connect, lend, release and die in any order: nothing is freed or reused while someone has it."""

from __future__ import annotations

import os
import shutil
import tempfile
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.shm.buffers.buffer_export import BufferExporter, BufferRequestRefused, ExportedBuffers, Loan, LoanError
from penstock.shm.buffers.device_api import DeviceRow
from penstock.shm.buffers.shared_buffers import BuffersExhausted, BufferSlice, SharedBuffer, SharedBuffers
from penstock.shm.messages import BufferContent, BufferKind, BufferRef, BufferRequest, BufferReturn, ContentSpec
from tests.shm.buffers.buffer_backend import BLOCK
from tests.shm.buffers.fake_device import FakeDevice

VALUES = 4
ROW_BYTES = 4 * VALUES
CONTENTS = (
    ContentSpec(BufferContent.TOKENS, 1, "<i4"),
    ContentSpec(BufferContent.LOGITS, VALUES, "<f4"),
    ContentSpec(BufferContent.PROMPT_EMBEDDINGS, VALUES, "<f4"),
)
BUDGET = 6 * BLOCK
STEPS = 3
"""The stream on which the backend's device reads, later."""
NUM_TARGETS = 1000


@dataclass(eq=False)
class Client:
    """A process, its connection, and the returns that it has not received yet."""

    device: FakeDevice
    exported: ExportedBuffers
    shared: SharedBuffers
    death_fd: int
    undelivered: list[BufferReturn] = field(default_factory=list)
    is_connected: bool = True
    is_running: bool = True
    written: dict[int, list[float]] = field(default_factory=dict)
    """Index → first value of each row that the backend wrote in the last loan."""
    held: dict[int, SharedBuffer] = field(default_factory=dict)
    """Buffers taken and not released yet, by index."""


@dataclass(eq=False)
class Lent:
    client: Client
    loan: Loan
    ref: BufferRef
    given: list[float] = field(default_factory=list)
    """First value of each row of embeddings that the client lent."""
    is_open: bool = True

    @property
    def is_prompt(self) -> bool:
        return self.ref.content is BufferContent.PROMPT_EMBEDDINGS


@dataclass
class Copy:
    """A read that is enqueued on the device, in order."""

    lent: Lent
    target: int
    expected: list[float]
    is_overwritten: bool = False
    """The client wrote to the buffer, on the host, before the device read it: the loan had ended."""


class Buffers(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ps-"))
        self.device = FakeDevice(self.directory)
        self.exporter = BufferExporter((BufferKind.CUDA, BufferKind.HOST), CONTENTS, BUDGET, self.device)
        self.clients: list[Client] = []
        self.loans: list[Lent] = []
        self.source = self.device.allocate(ROW_BYTES * (1 + NUM_TARGETS))
        self.num_written = 0
        self.copies: list[Copy] = []

    # Choices for the rules

    def running(self) -> list[Client]:
        return [client for client in self.clients if client.is_running]

    def connected(self) -> list[Client]:
        return [client for client in self.clients if client.is_connected]

    def held(self) -> list[tuple[Client, SharedBuffer]]:
        """Buffers taken in running processes, lent or not."""
        return [(client, buffer) for client in self.running() for buffer in client.held.values()]

    def lendable(self) -> list[tuple[Client, SharedBuffer]]:
        return [(client, buffer) for client, buffer in self.held() if client.is_connected and is_usable(buffer)]

    def open_loans(self) -> list[Lent]:
        return [lent for lent in self.loans if lent.is_open]

    def with_undelivered(self) -> list[Client]:
        return [client for client in self.connected() if client.undelivered]

    # Clients

    @precondition(lambda self: len(self.connected()) < 3)
    @rule(num_buffers=st.integers(1, 3), on_device=st.booleans())
    def connect(self, num_buffers: int, on_device: bool) -> None:
        buffer_request = BufferRequest(num_buffers, 3 * ROW_BYTES, (BufferKind.CUDA if on_device else BufferKind.HOST,))
        death_fd = os.eventfd(0)
        held_bytes = self.exporter.held_bytes
        with patch("os.pidfd_open", lambda _pid: os.dup(death_fd)):
            try:
                exported = self.exporter.export(buffer_request, 1)
            except BufferRequestRefused:
                assert held_bytes + num_buffers * (BLOCK if on_device else 4096) > BUDGET
                os.close(death_fd)
                return
        device = FakeDevice(self.directory)
        shared = SharedBuffers(exported.grant, exported.fds, lambda _: device)
        exported.close_fds()
        self.clients.append(Client(device, exported, shared, death_fd))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), how=st.sampled_from(["stays", "stays", "leaves", "disconnects", "dies"]))
    def depart(self, data: st.DataObject, how: str) -> None:
        """leaves: closes all buffers that are not held, and reports it if that was all; disconnects: closes nothing."""
        client = data.draw(st.sampled_from(self.running()))
        if how == "leaves" and client.is_connected:
            client.shared.close()
            self._disconnect(client, has_closed=client.shared.is_closed)
        elif how == "disconnects" and client.is_connected:
            self._disconnect(client, has_closed=False)
        elif how == "dies":
            self._die(client)

    def _die(self, client: Client) -> None:
        client.is_running = False
        client.device.die()
        if client.exported.grant.kind is BufferKind.HOST:
            client.shared.close()  # the kernel unmaps it
        os.eventfd_write(client.death_fd, 1)
        if client.is_connected:
            self._disconnect(client, has_closed=False)

    def _disconnect(self, client: Client, *, has_closed: bool) -> None:
        client.is_connected = False
        self.exporter.release_client(client.exported, has_closed=has_closed)
        for lent in self.open_loans():
            lent.is_open = lent.client is not client

    @precondition(lambda self: self.exporter.num_orphans)
    @rule()
    def reap(self) -> None:
        self.exporter.reap()

    # Buffers

    @precondition(lambda self: self.connected())
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.connected()))
        try:
            buffer = client.shared.take()
        except BuffersExhausted:
            assert client.shared.num_free == 0
            return
        assert buffer.index not in client.held, "two callers have it"
        client.held[buffer.index] = buffer

    @precondition(lambda self: self.lendable())
    @rule(data=st.data(), num_rows=st.integers(1, 3))
    def lend(self, data: st.DataObject, num_rows: int) -> None:
        client, buffer = data.draw(st.sampled_from(self.lendable()))
        ref = client.shared.lend(None, BufferSlice(buffer, BufferContent.LOGITS, num_rows))["output"]
        loan = client.exported.borrow(ref, to_backend=False)
        client.written[ref.index] = []
        self.loans.append(Lent(client, loan, ref))

    @precondition(lambda self: self.lendable())
    @rule(data=st.data(), num_rows=st.integers(1, 3))
    def lend_prompt(self, data: st.DataObject, num_rows: int) -> None:
        client, buffer = data.draw(st.sampled_from(self.lendable()))
        if not self.is_idle(client, buffer):
            self.run_device()
        self.num_written += num_rows
        given = [float(self.num_written + row) for row in range(num_rows)]
        rows = array("f", [value for value in given for _ in range(VALUES)]).tobytes()
        if client.exported.grant.kind is BufferKind.HOST:
            self.mark_overwritten(client, buffer.index)
            buffer.view()[: len(rows)] = rows
        else:
            client.device.poke(buffer.device_view().__cuda_array_interface__["data"][0], rows)
        prompt = BufferSlice(buffer, BufferContent.PROMPT_EMBEDDINGS, num_rows)
        ref = client.shared.lend(prompt, None)["tokens"]
        loan = client.exported.borrow(ref, to_backend=True)
        loan.check_written()
        client.written[ref.index] = []
        self.loans.append(Lent(client, loan, ref, given))

    @precondition(lambda self: any(lent.is_prompt for lent in self.loans) and len(self.copies) < NUM_TARGETS // 3)
    @rule(data=st.data(), first=st.integers(0, 2), by_host=st.booleans())
    def read(self, data: st.DataObject, first: int, by_host: bool) -> None:
        """At any time, even after the end of the loan or the client: late reads return nothing."""
        lent = data.draw(st.sampled_from([lent for lent in self.loans if lent.is_prompt][-4:]))
        num_rows = max(0, lent.ref.num_rows - first)
        first = min(first, lent.ref.num_rows)
        expected = [value for value in lent.given[first:] for _ in range(VALUES)]
        assert lent.loan.device_reads
        if by_host and not lent.loan.is_on_device:
            found = array("f", lent.loan.read_rows(first, num_rows)).tolist()
            assert found == (expected if lent.is_open else [0.0] * len(expected))
            return
        target = self.source + ROW_BYTES * (1 + 3 * len(self.copies))
        untouched = [-1.0] * len(expected)
        self.device.poke(target, array("f", untouched).tobytes())
        lent.loan.copy_rows(first, num_rows, DeviceRow(target, STEPS))
        self.copies.append(Copy(lent, target, expected if lent.is_open else untouched))

    @precondition(lambda self: self.copies)
    @rule()
    def run_device(self) -> None:
        """The device does the enqueued reads, whatever was returned, rewritten or freed since."""
        self.device.run(STEPS)
        for copy in self.copies:
            found = array("f", self.device.read(copy.target, 4 * len(copy.expected))).tolist()
            assert copy.is_overwritten or found == copy.expected
        self.copies.clear()

    def mark_overwritten(self, client: Client, index: int) -> None:
        """The client writes to the buffer at once."""
        for copy in self.copies:
            if copy.lent.client is client and copy.lent.ref.index == index and not copy.lent.loan.is_on_device:
                assert not copy.lent.is_open
                copy.is_overwritten = True

    def is_idle(self, client: Client, buffer: SharedBuffer) -> bool:
        """The device is done with it. The client waits for that before it touches it, as `device_view` does."""
        if client.exported.grant.kind is BufferKind.HOST:
            return True
        return client.device.has_passed(client.shared._device_memory.events[buffer.index])  # type: ignore[union-attr]

    @precondition(lambda self: any(not lent.is_prompt for lent in self.loans))
    @rule(data=st.data(), row=st.integers(0, 3))
    def write(self, data: st.DataObject, row: int) -> None:
        """At any time, even after the end of the loan or the client: late writes are dropped."""
        lent = data.draw(st.sampled_from([lent for lent in self.loans if not lent.is_prompt][-4:]))
        self.num_written += 1
        values = array("f", [float(self.num_written)] * VALUES)
        if lent.is_open:
            self.mark_overwritten(lent.client, lent.ref.index)
        self.device.poke(self.source, values.tobytes())
        lent.loan.write(row, DeviceRow(self.source, 0) if lent.loan.is_on_device else memoryview(values))
        written = lent.client.written[lent.ref.index]
        if lent.is_open and row <= len(written) and row < lent.ref.num_rows:
            written[row : row + 1] = [values[0]]

    @precondition(lambda self: self.open_loans())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lent = data.draw(st.sampled_from(self.open_loans()))
        lent.is_open = False
        lent.client.undelivered.append(lent.client.exported.give_back(lent.loan))

    @precondition(lambda self: self.with_undelivered())
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.with_undelivered()))
        client.shared.accept((client.undelivered.pop(0),))

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Idempotent; lent or not, before and after the end of the connection."""
        client, buffer = data.draw(st.sampled_from(self.held()))
        if client.is_connected and is_usable(buffer) and not self.is_idle(client, buffer):
            self.run_device()
        buffer.release()
        buffer.release()
        del client.held[buffer.index]

    @precondition(lambda self: any(lent.client.is_connected for lent in self.loans))
    @rule(data=st.data(), earlier=st.integers(0, 2))
    def lend_a_stale_reference(self, data: st.DataObject, earlier: int) -> None:
        """A stale or repeated reference never lends."""
        lent = data.draw(st.sampled_from([lent for lent in self.loans if lent.client.is_connected]))
        stale = BufferRef(lent.ref.index, max(0, lent.ref.generation - earlier), BufferContent.LOGITS, 1)
        with pytest.raises(LoanError):
            lent.client.exported.borrow(stale, to_backend=False)

    # Invariants

    @invariant()
    def returned_rows_are_what_was_written(self) -> None:
        if not hasattr(self, "exporter"):
            return
        for client, buffer in self.lendable():
            if buffer.spec is None or not self.is_idle(client, buffer):
                continue
            expected = [value for value in client.written[buffer.index] for _ in range(VALUES)]
            if client.exported.grant.kind is BufferKind.HOST:
                assert [value for row in buffer.rows().tolist() for value in row] == expected
            else:
                interface = buffer.device_rows().__cuda_array_interface__
                num_bytes = interface["shape"][0] * ROW_BYTES
                assert array("f", client.device.read(interface["data"][0], num_bytes)).tolist() == expected

    @invariant()
    def counts_are_conserved(self) -> None:
        if not hasattr(self, "exporter"):
            return
        for client in self.clients:
            num_open = sum(lent.client is client for lent in self.open_loans())
            assert client.exported.num_lent == client.exported.num_returned + num_open
            if client.is_connected:
                assert client.shared.num_lent - client.shared.num_returned == num_open + len(client.undelivered)

    @invariant()
    def memory_stays_allocated_exactly_while_someone_has_it_open(self) -> None:
        if not hasattr(self, "exporter"):
            return
        kept = [c for c in self.clients if c.is_connected or c.exported in self.exporter._orphans]
        assert self.exporter.held_bytes == sum(client.exported.num_bytes for client in kept) <= BUDGET
        on_device = [client for client in kept if client.exported.grant.kind is BufferKind.CUDA]
        assert self.device.num_allocated == 1 + sum(client.exported.grant.num_buffers for client in on_device)
        for client in self.running():
            assert client.device.num_opened == 0 or client in on_device, "freed under its client"
            if client.exported.grant.kind is BufferKind.CUDA:
                num_usable = sum(is_usable(buffer) for buffer in client.held.values())
                assert client.device.num_opened >= num_usable, "closed under its caller"

    def teardown(self) -> None:
        if not hasattr(self, "exporter"):
            return
        for client in self.running():
            self._die(client)
        self.run_device()
        self.exporter.reap()
        self.device.free(self.source)
        assert (self.exporter.held_bytes, self.exporter.num_orphans, self.device.num_allocated) == (0, 0, 0)
        for client in self.clients:
            os.close(client.death_fd)
        shutil.rmtree(self.directory)


def is_usable(buffer: SharedBuffer) -> bool:
    """The caller may touch it."""
    return buffer._state.name == "HELD"


Buffers.TestCase.settings = settings(max_examples=30, stateful_step_count=50, suppress_health_check=list(HealthCheck))
TestBuffers = Buffers.TestCase
