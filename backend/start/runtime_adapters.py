"""Adapters that may be loaded at run time: where they are, how much memory they take, and which a restart finds."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.engine.interfaces import IEngineLink
from penstock.backend.engine.requests.adapters import AdapterSet, AdapterTable, IPassThread, Loaded
from penstock.backend.engine.requests.request_table import RequestTable
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import IBatchedForwardPass
from penstock.backend.forward_pass.extensions import ILoadsAdapters
from penstock.backend.options import BackendOptions
from penstock.backend.start.lora_modules import NAME, NAME_FORM, NamedAdapter, announce
from penstock.backend.start.startup import named_adapters
from penstock.process.options import format_size
from penstock.shm.messages import Adapter, ModelCard

logger = logging.getLogger("penstock.backend")


class _Kept(Struct, frozen=True):
    """An adapter that was loaded at run time, for the next start."""

    name: str
    directory: str
    adapter_id: str


class RuntimeAdapters:
    """Implements `IAdapterRules` for --lora-dir: adapters are in that directory, and together within --lora-budget."""

    def __init__(self, options: BackendOptions, directory: Path) -> None:
        self._root = directory.expanduser().resolve()
        self._budget = options.lora_budget
        fixed = named_adapters(options)
        self._own_names = (options.model_id(), *options.aliases(), *(adapter.name for adapter in fixed))
        self._fd = options.adapters_fd
        self._lock_fd = None if self._fd is None else os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR)
        """Each backend that has read the list holds a shared lock until it ends, and with it alone the list changes."""
        if self._lock_fd is not None:
            fcntl.flock(self._lock_fd, fcntl.LOCK_SH)
        self.kept = self._kept()
        """The adapters that the last process had, as far as they are still the same."""

    def find_directory(self, name: str, path: str) -> Path:
        if not NAME.fullmatch(name):
            raise StartupError(f"lora_name: {shorten(name)}: {NAME_FORM}")
        if name in self._own_names:
            raise StartupError(
                f"lora_name: {shorten(name)} is the name of the model or of an adapter of --lora-modules"
            )
        try:
            found = (self._root / path).resolve()  # follows links, so that none leads out of the directory
            if not found.is_relative_to(self._root):
                raise StartupError(f"lora_path: {shorten(path)} is outside of the server's --lora-dir")
            is_dir = found.is_dir()
            str(found).encode()  # as `remember` must
        except (OSError, ValueError, RuntimeError) as error:  # a NUL, a name that is too long, a circle of links
            reason = error.strerror if isinstance(error, OSError) else type(error).__name__
            raise StartupError(f"lora_path: {shorten(path)} is no usable path: {reason}") from None
        if not is_dir:
            raise StartupError(f"lora_path: the server's --lora-dir has no directory {shorten(path)}")
        return found

    def announce(self, name: str, directory: Path, rank: int) -> Adapter:
        return announce([NamedAdapter(name, directory)], [rank])[0]

    def check_room(self, num_bytes: int, taken_bytes: int) -> None:
        if num_bytes + taken_bytes > self._budget:
            raise StartupError(
                f"the adapter takes {format_size(num_bytes)}; of --lora-budget {format_size(self._budget)} "
                f"{format_size(max(0, self._budget - taken_bytes))} are left"
            )

    @contextlib.contextmanager
    def changing(self) -> Generator[bool, None, None]:
        is_alone = True
        if self._lock_fd is None:
            yield is_alone
            return
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_alone = False
        try:
            yield is_alone
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_SH)  # others hold it exclusively for less than a turn

    def remember(self, loaded: Mapping[str, tuple[Path, str]]) -> None:
        """One line in the fd, whose rest is old: a kill in between leaves this list or the one before."""
        if self._fd is not None:
            kept = [_Kept(name, str(directory), adapter_id) for name, (directory, adapter_id) in loaded.items()]
            line = msgspec.json.encode(kept) + b"\n"
            os.pwrite(self._fd, line, 0)
            os.ftruncate(self._fd, len(line))

    def _kept(self) -> list[NamedAdapter]:
        if self._fd is None:
            return []
        line, _, _ = os.pread(self._fd, os.fstat(self._fd).st_size, 0).partition(b"\n")
        found = msgspec.json.decode(line, type=list[_Kept]) if line else []
        return [NamedAdapter(each.name, Path(each.directory)) for each in found if self._is_same(each)]

    def _is_same(self, kept: _Kept) -> bool:
        from penstock.backend.checkpoint.tensor_files.lora_adapter import adapter_id

        reason = "its name is taken" if kept.name in self._own_names else "its files have changed"
        with contextlib.suppress(StartupError, OSError):
            if kept.name not in self._own_names and adapter_id(Path(kept.directory)) == kept.adapter_id:
                return True
        logger.warning("the adapter %s is not loaded again: %s", kept.name, reason)
        return False


def with_kept_adapters(options: BackendOptions) -> tuple[BackendOptions, RuntimeAdapters | None]:
    """Name the adapters that the last process had loaded as --lora-modules does. Raises StartupError."""
    if options.lora_dir is None:
        return options, None
    if not options.lora_dir.expanduser().is_dir():
        raise StartupError(f"--lora-dir: the directory {options.lora_dir} does not exist")
    rules = RuntimeAdapters(options, options.lora_dir)
    kept = tuple(f"{adapter.name}={adapter.directory}" for adapter in rules.kept)
    return replace(options, lora_modules=(*options.lora_modules, *kept)), rules


def adapter_set(card: ModelCard, forward_pass: IBatchedForwardPass, rules: RuntimeAdapters | None) -> AdapterSet:
    """The adapters with which the backend starts. Raises StartupError for a pass that loads none later, with rules."""
    indexes = {adapter.adapter_id: index for index, adapter in enumerate(card.adapters)}
    adapters = AdapterSet(indexes, announced=card.adapters)
    if rules is not None:
        if not (forward_pass.spec.generates and isinstance(forward_pass, ILoadsAdapters)):
            raise StartupError(
                "--lora-dir: this forward pass loads no adapters at run time; the built-in decoder does, for models "
                "that generate"
            )
        for kept in rules.kept:
            adapters.loaded[kept.name] = Loaded(kept.directory, forward_pass.adapter_bytes(kept.directory))
    return adapters


def make_adapter_table(
    link: IEngineLink,
    table: RequestTable,
    adapters: AdapterSet,
    forward_pass: IBatchedForwardPass,
    executor: IPassThread,
    rules: RuntimeAdapters | None,
) -> AdapterTable:
    loads = forward_pass if isinstance(forward_pass, ILoadsAdapters) else None
    return AdapterTable(link, table, adapters, loads, executor, rules)
