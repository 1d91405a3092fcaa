"""A fake GPU: `DeviceApi` on files that several processes map.

Memory and events are files in the device's directory. Work on a stream other than 0 waits for `run`. What the driver
leaves undefined is an error here: freeing memory that a running process has open, or opening it in its own process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.shm.buffers.device_api import HANDLE_BYTES, DeviceError

UUID = bytes(range(16))
_FIRST_POINTER = 0x7F00_0000_0000
_WAIT_S = 10.0
_NUMBER_BYTES = 4


@dataclass(frozen=True)
class _Region:
    name: str
    mapping: mmap.mmap
    is_own: bool


class FakeDevice:
    """One process's view of the device in this directory. `die` is the end of that process, as the driver sees it."""

    uuid = UUID

    def __init__(self, directory: Path, *, free_bytes: int = 1 << 30, refuses_registration: bool = False) -> None:
        self._directory = directory
        self._owner = secrets.token_hex(4)
        self._free_bytes = free_bytes
        self._refuses_registration = refuses_registration
        self._memory: dict[int, _Region] = {}
        self._events: dict[int, _Region] = {}
        self._next_pointer = _FIRST_POINTER + (secrets.randbits(16) << 32)
        self._next_event = 1
        self._streams: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        self.registered: dict[int, int] = {}
        """Address → bytes of page-locked host memory."""

    # For tests

    @property
    def num_allocated(self) -> int:
        return sum(region.is_own for region in self._memory.values())

    @property
    def num_opened(self) -> int:
        return sum(not region.is_own for region in self._memory.values())

    @property
    def num_events(self) -> int:
        return len(self._events)

    def allocated_bytes(self) -> list[int]:
        return [len(region.mapping) for region in self._memory.values() if region.is_own]

    def poke(self, pointer: int, data: bytes) -> None:
        """Write as a kernel on the default stream does."""
        region, offset = self._find(pointer, len(data))
        region.mapping[offset : offset + len(data)] = data

    def run(self, stream: int) -> None:
        """Do the work on the stream, in order."""
        work = self._streams[stream]
        while work:
            work[0]()
            del work[0]

    def die(self) -> None:
        for region in [*self._memory.values(), *self._events.values()]:
            region.mapping.close()
        for marker in self._directory.glob(f"open-*-{self._owner}"):
            marker.unlink()
        self._memory.clear()
        self._events.clear()

    # DeviceApi

    def allocate(self, num_bytes: int) -> int:
        if sum(self.allocated_bytes()) + num_bytes > self._free_bytes:
            raise DeviceError(f"allocate({num_bytes}): out of memory")
        name = f"memory-{secrets.token_hex(8)}"
        (self._directory / name).write_bytes(bytes(num_bytes))
        return self._place(name, is_own=True)

    def free(self, pointer: int) -> None:
        for stream in list(self._streams):  # freeing waits for the device
            self.run(stream)
        region = self._memory.get(pointer)
        if region is not None and (users := self._users(region.name)):
            raise DeviceError(f"free({pointer:#x}): opened by {users}; undefined behaviour")
        region = self._pop(self._memory, pointer, is_own=True)
        region.mapping.close()
        (self._directory / region.name).unlink()

    def export_memory(self, pointer: int) -> bytes:
        region = self._memory.get(pointer)
        if region is None or not region.is_own:
            raise DeviceError(f"export_memory({pointer:#x}): not an allocation's beginning")
        return region.name.encode().ljust(HANDLE_BYTES, b"\0")

    def open_memory(self, handle: bytes) -> tuple[int, int]:
        name = self._name(handle, "memory-")
        pointer = self._place(name, is_own=False)
        (self._directory / f"open-{name}-{os.getpid()}-{self._owner}").touch()
        return pointer, len(self._memory[pointer].mapping)

    def close_memory(self, pointer: int) -> None:
        region = self._pop(self._memory, pointer, is_own=False)
        region.mapping.close()
        (self._directory / f"open-{region.name}-{os.getpid()}-{self._owner}").unlink()

    def create_event(self) -> int:
        name = f"event-{secrets.token_hex(8)}"
        # The number of recordings, then a flag per recording (modulo the rest of the page): it has passed.
        (self._directory / name).write_bytes(bytes(_NUMBER_BYTES) + b"\1" + bytes(mmap.PAGESIZE - _NUMBER_BYTES - 1))
        return self._place_event(name, is_own=True)

    def destroy_event(self, event: int) -> None:
        region = self._events.pop(event, None)
        if region is None:
            raise DeviceError(f"destroy_event({event}): unknown")
        region.mapping.close()
        if region.is_own:
            (self._directory / region.name).unlink()

    def export_event(self, event: int) -> bytes:
        return self._event(event).name.encode().ljust(HANDLE_BYTES, b"\0")

    def open_event(self, handle: bytes) -> int:
        return self._place_event(self._name(handle, "event-"), is_own=False)

    def record(self, event: int, stream: int) -> None:
        mapping, number = self._event(event).mapping, self._number(event) + 1
        mapping[_flag_of(number)] = 0
        mapping[:_NUMBER_BYTES] = number.to_bytes(_NUMBER_BYTES, "little")

        def mark_passed() -> None:
            if not mapping.closed:  # the event may have been destroyed
                mapping[_flag_of(number)] = 1

        self._put(stream, mark_passed)

    def has_passed(self, event: int) -> bool:
        return self._event(event).mapping[_flag_of(self._number(event))] == 1

    def wait(self, event: int, stream: int) -> None:
        """Like the driver, wait for the last recording so far."""
        number = self._number(event)
        self._put(stream, lambda: self._await(event, number))

    def synchronize(self, event: int) -> None:
        number = self._number(event)
        for stream in list(self._streams):  # this process's work goes on while it waits
            self.run(stream)
        self._await(event, number)

    def _number(self, event: int) -> int:
        return int.from_bytes(self._event(event).mapping[:_NUMBER_BYTES], "little")

    def _await(self, event: int, number: int) -> None:
        deadline_s = time.monotonic() + _WAIT_S
        while not self._event(event).mapping[_flag_of(number)]:
            if time.monotonic() > deadline_s:
                raise DeviceError(f"event {event}: it never passes")
            time.sleep(0.001)

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        to_region, to_offset = self._find(destination, num_bytes)
        from_region, from_offset = self._find(source, num_bytes)

        def copy() -> None:
            data = from_region.mapping[from_offset : from_offset + num_bytes]
            to_region.mapping[to_offset : to_offset + num_bytes] = data

        self._put(stream, copy)

    def copy_from_host(self, destination: int, address: int, num_bytes: int, stream: int) -> None:
        region, offset = self._find(destination, num_bytes)
        self._check_registered(address, num_bytes)

        def copy() -> None:
            self._check_registered(address, num_bytes)
            region.mapping[offset : offset + num_bytes] = ctypes.string_at(address, num_bytes)

        self._put(stream, copy)

    def _check_registered(self, address: int, num_bytes: int) -> None:
        if not any(start <= address and address + num_bytes <= start + size for start, size in self.registered.items()):
            raise DeviceError(f"{num_bytes} bytes at {address:#x} of the host: an illegal access")

    def read(self, pointer: int, num_bytes: int) -> bytes:
        region, offset = self._find(pointer, num_bytes)
        return region.mapping[offset : offset + num_bytes]

    def register_host(self, address: int, num_bytes: int) -> None:
        if self._refuses_registration:
            raise DeviceError("register_host: not supported")
        if address in self.registered:
            raise DeviceError(f"register_host({address:#x}): registered already")
        ctypes.string_at(address, num_bytes)  # faults if it is not mapped
        self.registered[address] = num_bytes

    def unregister_host(self, address: int) -> None:
        if address not in self.registered:
            raise DeviceError(f"unregister_host({address:#x}): not registered")
        ctypes.string_at(address, self.registered.pop(address))

    # Internals

    def _put(self, stream: int, work: Callable[[], None]) -> None:
        if stream:
            self._streams[stream].append(work)
        else:
            work()

    def _users(self, name: str) -> list[int]:
        """Running processes that have the allocation open."""
        pids = [int(marker.name.split("-")[3]) for marker in self._directory.glob(f"open-{name}-*")]
        return [pid for pid in pids if _is_running(pid)]

    def _name(self, handle: bytes, kind: str) -> str:
        name = handle.rstrip(b"\0").decode("latin-1")
        if not name.startswith(kind) or "/" in name or not (self._directory / name).exists():
            raise DeviceError("open: the handle is invalid")
        if any(r.is_own and r.name == name for r in [*self._memory.values(), *self._events.values()]):
            raise DeviceError("open: the handle is of this process")
        return name

    def _map(self, name: str, *, is_own: bool) -> _Region:
        with (self._directory / name).open("r+b") as file:
            return _Region(name, mmap.mmap(file.fileno(), 0), is_own)

    def _place(self, name: str, *, is_own: bool) -> int:
        region, pointer = self._map(name, is_own=is_own), self._next_pointer
        self._memory[pointer] = region
        self._next_pointer += len(region.mapping) + (1 << 21)
        return pointer

    def _place_event(self, name: str, *, is_own: bool) -> int:
        event = self._next_event
        self._events[event] = self._map(name, is_own=is_own)
        self._next_event += 1
        return event

    def _event(self, event: int) -> _Region:
        if event not in self._events:
            raise DeviceError(f"event {event}: unknown")
        return self._events[event]

    def _find(self, pointer: int, num_bytes: int) -> tuple[_Region, int]:
        for start, region in self._memory.items():
            if start <= pointer and pointer + num_bytes <= start + len(region.mapping):
                return region, pointer - start
        raise DeviceError(f"{num_bytes} bytes at {pointer:#x}: an illegal access")

    def _pop(self, table: dict[int, _Region], pointer: int, *, is_own: bool) -> _Region:
        region = table.get(pointer)
        if region is None or region.is_own is not is_own:
            raise DeviceError(f"{pointer:#x} is not {'an allocation' if is_own else 'opened memory'} of this process")
        return table.pop(pointer)


def _flag_of(number: int) -> int:
    """Offset of a recording's flag in the event's page."""
    return _NUMBER_BYTES + number % (mmap.PAGESIZE - _NUMBER_BYTES)


def _is_running(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False
