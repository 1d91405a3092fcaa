"""Weights that outlive the process which packed them: it leaves them in a store, and the next one maps them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.checkpoint.config.weight_shapes import WeightShapes
from penstock.backend.dtypes import Dtype
from penstock.backend.passes.ops.interface import Weights
from penstock.backend.passes.shared_weights.blocks import SharedBlocks, SharedWeightsError, WeightStore
from penstock.backend.passes.shared_weights.watch import WatchedWeights
from penstock.process.options import format_size
from penstock.shm.buffers.device_api import DeviceError
from penstock.shm.memory.fd_mailbox import close_all

logger = logging.getLogger("penstock.backend")

P = TypeVar("P")
Memory: TypeAlias = Any
"""Gives out places for packed weights, in the form of a device's operations."""


class MappedMemory(Protocol):
    """A `Memory` with the weights of an earlier process, mapped here."""

    @property
    def dtype(self) -> Dtype:
        """The dtype of the weights that are not quantised."""

    @property
    def blocks(self) -> SharedBlocks: ...

    def stand_in(self, shape: tuple[int, ...], dtype: Dtype) -> Any:
        """Return what stands for the numbers of a weight, which are not needed, in the form that packs it."""

    def check_some(self) -> int:
        """Check blocks for a moment, and return their number. Raises SharedWeightsError."""

    def check_all_placed(self) -> None:
        """Raises SharedWeightsError if weights are left over."""

    def unmap(self) -> None:
        """Unmap the memory; its tensors must not be used any more."""


class FilledMemory(Protocol):
    """A `Memory` that is being filled with weights."""

    def finish(self, fingerprint: str, dtype: Dtype) -> SharedBlocks:
        """Make it memory that others can map. Raises OSError, DeviceError, or SharedWeightsError for broken memory."""

    @property
    def fds(self) -> Sequence[int]:
        """The descriptors for the mailbox, after `finish`."""

    def keep(self) -> None:
        """Note that others can find it now: `close` leaves it mapped."""

    def close(self) -> None:
        """Close the fds. Tensors in memory that is kept stay valid; other device memory is freed."""


class Memories(Protocol):
    """A kind of memory that can hold weights."""

    def fingerprint_of(self, fds: Sequence[int]) -> str:
        """Raises SharedWeightsError."""

    def map(self, fds: Sequence[int]) -> MappedMemory:
        """The fds stay the caller's. Raises SharedWeightsError."""

    def fill(self) -> FilledMemory:
        """Raises OSError or DeviceError."""


def load_or_map(
    places: Iterable[tuple[WeightStore, Memories]],
    fingerprint: str,
    config: DecoderConfig,
    build: Callable[[Weights, Dtype, Memory], P],
    load: Callable[[Memory], tuple[P, Dtype]],
    private: Callable[[], Memory],
) -> tuple[P, WatchedWeights | None]:
    """Return build's pass over weights that are shared in the first place that can be used, or load's, whose weights
    are shared there from now on. private makes memory that ends with the process, for want of such a place.

    Another process that wants the same weights waits meanwhile, and then maps them. Raises what load raises.
    """
    for store, memories in places:
        with store.locked():
            found = _find(store, fingerprint, config, memories, build) or _fill(store, fingerprint, memories, load)
        if found is not None:
            return found
    # Only now is the memory of a failed attempt free: its frames kept it.
    return load(private())[0], None


def _find(
    store: WeightStore,
    fingerprint: str,
    config: DecoderConfig,
    memories: Memories,
    build: Callable[[Weights, Dtype, Memory], P],
) -> tuple[P, WatchedWeights] | None:
    fds = find_shared(store, fingerprint, memories)
    if fds:
        try:
            return _map(store, fds, config, memories, build)
        except SharedWeightsError as error:
            logger.error("the shared weights are dropped, and loaded from their files: %s", error)
        finally:
            close_all(fds)
    elif not store.is_empty:
        logger.info("the shared weights are of another checkpoint, other options or other code: they are loaded anew")
    store.clear()  # before there is memory for the next ones
    return None


def find_shared(store: WeightStore, fingerprint: str, memories: Memories) -> Sequence[int]:
    """Fds of memory with these weights, which the caller closes; empty if none or other weights are there."""
    fds = store.find()
    if not fds:
        return ()
    try:
        found = memories.fingerprint_of(fds)
    except SharedWeightsError as error:
        logger.error("the shared weights cannot be used: %s", error)
        found = None
    if found == fingerprint:
        return fds
    close_all(fds)
    return ()


def _map(
    store: WeightStore,
    fds: Sequence[int],
    config: DecoderConfig,
    memories: Memories,
    build: Callable[[Weights, Dtype, Memory], P],
) -> tuple[P, WatchedWeights]:
    """Raises SharedWeightsError."""
    mapped = memories.map(fds)
    blocks = mapped.blocks
    try:
        num_checked = _check_some(store, mapped)
        built = build(WeightShapes(config, mapped.stand_in), mapped.dtype, mapped)
        mapped.check_all_placed()
    except BaseException:
        blocks.close()
        mapped.unmap()
        raise
    logger.info(
        "mapped %s of packed weights that an earlier backend left; %d of %d blocks are checked",
        format_size(blocks.num_bytes), num_checked, len(blocks),
    )  # fmt: skip
    return built, WatchedWeights(store, blocks, is_mapped=True)


def _check_some(store: WeightStore, mapped: MappedMemory) -> int:
    """Raises SharedWeightsError, and what reading broken device memory raises: then every start would fail here."""
    try:
        return mapped.check_some()
    except Exception:
        store.clear()
        raise


def _fill(
    store: WeightStore,
    fingerprint: str,
    memories: Memories,
    load: Callable[[Memory], tuple[P, Dtype]],
) -> tuple[P, WatchedWeights] | None:
    try:
        with contextlib.closing(memories.fill()) as filled:
            loaded, dtype = load(filled)
            blocks = filled.finish(fingerprint, dtype)
            try:
                store.leave(filled.fds)
            except OSError:
                blocks.close()
                raise
            filled.keep()
    except BaseException as error:
        store.clear()
        if not isinstance(error, OSError | DeviceError | SharedWeightsError):
            raise
        logger.warning("the weights cannot be shared: %s; the next start loads them again", error)
        return None
    logger.info("%s of packed weights are left for the next backend", format_size(blocks.num_bytes))
    return loaded, WatchedWeights(store, blocks, is_mapped=False)
