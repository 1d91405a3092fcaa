"""Adapters that are loaded and unloaded while requests run."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from penstock.backend.engine.interfaces import IEngineLink
from penstock.backend.engine.requests.request_table import RequestTable
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass.extensions import ILoadsAdapters, ReadAdapter
from penstock.shm.messages import MAX_ADAPTERS, NO_TOKEN, Adapter, ChangeAdapter, Failure, FailureCode, Finish

logger = logging.getLogger("penstock.backend")

_MAX_ORDERS = 16
"""Orders to load that wait for the one that is carried out."""
_NOT_NOW = "adapters cannot be changed while another backend takes over from this one: try again when it has"


class IPassThread(Protocol):
    """The thread that calls the pass: `Executor`."""

    def call(self, work: Callable[[], None]) -> None:
        """Do this after the steps that were launched before it."""

    def wake(self) -> None:
        """Wake the loop. Safe from any thread."""


class IAdapterRules(Protocol):
    """Checks what the operator allows, and keeps the list of loaded adapters for a restart."""

    def find_directory(self, name: str, path: str) -> Path:
        """The directory of an adapter to load. Raises StartupError."""

    def announce(self, name: str, directory: Path, rank: int) -> Adapter:
        """Raises StartupError."""

    def check_room(self, num_bytes: int, taken_bytes: int) -> None:
        """Raises StartupError if the adapter takes more memory than is left beside those that were loaded before."""

    def changing(self) -> AbstractContextManager[bool]:
        """Whether no other backend would miss a change in this block: no successor has read what `remember` keeps."""

    def remember(self, loaded: Mapping[str, tuple[Path, str]]) -> None:
        """Keep the directories and ids of the adapters by name for the next start."""


@dataclass(slots=True)
class Loaded:
    """An adapter that can be unloaded."""

    directory: Path
    num_bytes: int


@dataclass(slots=True)
class AdapterSet:
    """The adapters that the pass has."""

    indexes: dict[str, int] = field(default_factory=dict)
    """By id. `EngineLimits.adapters` is the same object, and so changes with it."""
    unloaded: dict[str, int] = field(default_factory=dict)
    """Ids whose memory is freed when their last request has ended, with its bytes. `EngineLimits.unloaded` is the same
    object."""
    announced: tuple[Adapter, ...] = ()
    loaded: dict[str, Loaded] = field(default_factory=dict)
    """By name, those that were loaded at run time."""


@dataclass(slots=True)
class _Order:
    frontend: int
    message: ChangeAdapter
    directory: Path
    read: ReadAdapter | None = None
    adapter: Adapter | None = None
    num_bytes: int = 0
    fault: str = ""
    is_cancelled: bool = False


class AdapterTable:
    """Carries out the operator's orders. Files are read on a thread of their own, one adapter at a time.

    Without a pass and rules all orders are refused.
    """

    def __init__(
        self,
        link: IEngineLink,
        table: RequestTable,
        adapters: AdapterSet,
        forward_pass: ILoadsAdapters | None = None,
        executor: IPassThread | None = None,
        rules: IAdapterRules | None = None,
        start: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """start runs a function on another thread."""
        self._link, self._table, self._adapters = link, table, adapters
        self._pass, self._executor, self._rules = forward_pass, executor, rules
        self._start = start or _start_thread
        self._waiting: deque[_Order] = deque()
        self._reading: _Order | None = None
        self._read: deque[_Order] = deque()
        """Orders that the thread has finished."""

    def change(self, frontend: int, message: ChangeAdapter) -> None:
        self._carry_out(frontend, message, lambda: self._change(frontend, message))

    def cancel(self, frontend: int, request_id: int | None = None) -> None:
        """Drop the frontend's orders, or one of them, that wait or are read: nobody would learn of their effect."""
        for order in (*self._waiting, *self._read, self._reading):
            if order is not None and order.frontend == frontend and request_id in (None, order.message.request_id):
                order.is_cancelled = True
        self._waiting = deque(order for order in self._waiting if not order.is_cancelled)

    def _change(self, frontend: int, message: ChangeAdapter) -> None:
        name, path = message.change.name, message.change.directory
        if not path:
            self._unload(frontend, message)
            return
        if self._rules is None:
            self._refuse(frontend, message, "lora_name: adapters are loaded at run time only with --lora-dir")
        elif len(self._waiting) >= _MAX_ORDERS:
            self._refuse(frontend, message, f"lora_name: {_MAX_ORDERS} adapters wait to be loaded, the limit")
        else:
            try:
                order = _Order(frontend, message, self._rules.find_directory(name, path))
            except StartupError as error:
                self._refuse(frontend, message, str(error))
                return
            self._waiting.append(order)
            self._read_next()

    def turn(self) -> None:
        """Take over what was read, and free what no request needs any more."""
        while self._read:
            order = self._read.popleft()
            self._reading = None
            if not order.is_cancelled:
                self._carry_out(order.frontend, order.message, functools.partial(self._finish, order))
            self._read_next()
        for adapter_id in tuple(self._adapters.unloaded):
            index = self._adapters.indexes[adapter_id]
            if not self._table.uses_adapter(index):
                del self._adapters.unloaded[adapter_id]
                del self._adapters.indexes[adapter_id]
                self._put(index, None)

    def _read_next(self) -> None:
        if self._reading is None and self._waiting:
            self._reading = order = self._waiting.popleft()
            taken_bytes = sum(loaded.num_bytes for loaded in self._adapters.loaded.values())
            taken_bytes += sum(self._adapters.unloaded.values())
            try:
                self._start(lambda: self._read_files(order, taken_bytes))
            except RuntimeError as error:  # the system has no thread left
                order.fault = f"lora_path: {error}"
                self._read.append(order)

    def _read_files(self, order: _Order, taken_bytes: int) -> None:
        """On the other thread."""
        if self._pass is None or self._rules is None or self._executor is None:
            raise RuntimeError("an adapter was ordered without a pass; this is a bug")
        try:
            order.num_bytes = self._pass.adapter_bytes(order.directory)
            self._rules.check_room(order.num_bytes, taken_bytes)
            before = self._rules.announce(order.message.change.name, order.directory, 1)
            order.read = self._pass.read_adapter(order.directory)
            order.adapter = self._rules.announce(order.message.change.name, order.directory, order.read.rank)
            if order.adapter.adapter_id != before.adapter_id:
                raise StartupError(f"{order.directory} has changed while it was read: load it again")
        except (StartupError, OSError, MemoryError) as error:
            order.fault = f"lora_path: {error}"
        except Exception as error:  # a damaged file can raise anything; the engine goes on
            logger.exception("an adapter could not be read")
            order.fault = f"lora_path: {type(error).__name__}"
        self._read.append(order)
        self._executor.wake()

    def _finish(self, order: _Order) -> None:
        known, name = self._adapters, order.message.change.name
        if not order.fault and any(adapter.name == name for adapter in known.announced):
            order.fault = f"lora_name: {name} has already been loaded"
        if not order.fault and len(known.announced) >= MAX_ADAPTERS:
            order.fault = f"lora_name: {MAX_ADAPTERS} adapters are loaded, the limit"
        if order.fault or order.adapter is None or order.read is None:
            self._refuse(order.frontend, order.message, order.fault)
            return
        adapter_id = order.adapter.adapter_id
        loaded = {**known.loaded, name: Loaded(order.directory, order.num_bytes)}
        announced = (*known.announced, order.adapter)
        self._remember(announced, loaded)  # first: if it fails, nothing has changed
        known.unloaded.pop(adapter_id, None)
        if adapter_id not in known.indexes:  # else its weights have another name too, or are not freed yet
            index = next(index for index in range(len(known.indexes) + 1) if index not in known.indexes.values())
            self._put(index, order.read)
            known.indexes[adapter_id] = index
        known.loaded = loaded
        logger.info("the adapter %s was loaded from %s (rank %d)", name, order.directory, order.adapter.rank)
        self._announce(announced)
        self._link.push(order.frontend, order.message.request_id, NO_TOKEN, Finish.STOP)

    def _unload(self, frontend: int, message: ChangeAdapter) -> None:
        known, name = self._adapters, message.change.name
        if name not in known.loaded:
            fixed = any(adapter.name == name for adapter in known.announced)
            text = f"lora_name: {name} is an adapter of --lora-modules, which stays" if fixed else ""
            code = FailureCode.BAD_ADAPTER if fixed else FailureCode.NO_ADAPTER
            self._push_failure(frontend, Failure(message.request_id, code, text=text))
            return
        loaded = {other: each for other, each in known.loaded.items() if other != name}
        left = tuple(adapter for adapter in known.announced if adapter.name != name)
        (gone,) = (adapter for adapter in known.announced if adapter.name == name)
        self._remember(left, loaded)  # first: if it fails, nothing has changed
        if all(adapter.adapter_id != gone.adapter_id for adapter in left):
            known.unloaded[gone.adapter_id] = known.loaded[name].num_bytes
        known.loaded = loaded
        logger.info("the adapter %s was unloaded; requests that have it go on", name)
        self._announce(left)
        self._link.push(frontend, message.request_id, NO_TOKEN, Finish.STOP)

    def _remember(self, announced: tuple[Adapter, ...], loaded: dict[str, Loaded]) -> None:
        if self._rules is not None:
            ids = {adapter.name: adapter.adapter_id for adapter in announced}
            self._rules.remember({name: (each.directory, ids[name]) for name, each in loaded.items()})

    def _announce(self, adapters: tuple[Adapter, ...]) -> None:
        self._adapters.announced = adapters
        self._link.announce_adapters(adapters)

    def _carry_out(self, frontend: int, message: ChangeAdapter, work: Callable[[], None]) -> None:
        """An error of ours fails this one order; the loop goes on."""
        failure = Failure(message.request_id, FailureCode.UNAVAILABLE, text=_NOT_NOW)
        try:
            with nullcontext(True) if self._rules is None else self._rules.changing() as is_allowed:
                if is_allowed:
                    work()
                    return
        except Exception:
            logger.exception("request %d of frontend %d fails: an adapter", message.request_id, frontend)
            failure = Failure(message.request_id, FailureCode.INTERNAL)
        self._push_failure(frontend, failure)

    def _put(self, index: int, read: ReadAdapter | None) -> None:
        if (forward_pass := self._pass) is not None and self._executor is not None:
            self._executor.call(lambda: forward_pass.put_adapter(index, read))

    def _refuse(self, frontend: int, message: ChangeAdapter, text: str) -> None:
        logger.warning("an adapter was not loaded: %s", text)
        self._push_failure(frontend, Failure(message.request_id, FailureCode.BAD_ADAPTER, text=text[:512]))

    def _push_failure(self, frontend: int, failure: Failure) -> None:
        self._link.push(frontend, failure.request_id, NO_TOKEN, Finish.REJECTED, failure=failure)


def _start_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="adapter", daemon=True).start()
