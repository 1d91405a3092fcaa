"""Moves pages within the cache, to page-locked host memory, and back, if copying is faster than recomputing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from penstock.backend.forward_pass import StepBatch
from penstock.backend.passes.cuda.device.device import Device
from penstock.backend.passes.cuda.device.launcher import Kernel, Launcher
from penstock.backend.passes.cuda.device.link_probe import LinkSpeed
from penstock.backend.passes.cuda.device.transfers import Ints, Uplink
from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.shm.buffers.device_api import DeviceError

logger = logging.getLogger("penstock.backend")


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Seconds to get back the keys and values of one token, in all layers."""

    copy_s: float
    """Copy them to the host and back."""
    compute_s: float
    """Recompute them in a prefill step of the largest size."""

    def __str__(self) -> str:
        return (
            f"a token's KV takes {self.copy_s * 1e6:.2f} µs to copy to the host and back, "
            f"{self.compute_s * 1e6:.2f} µs to recompute"
        )


def count_host_pages(costs: TokenCosts, page_bytes: int, budget_bytes: int) -> int:
    """Return the number of pages that fit the budget; 0 if recomputing is at least as fast as copying."""
    return budget_bytes // page_bytes if costs.copy_s < costs.compute_s else 0


class HostPool:
    """Host pages, possibly none, in page-locked memory that kernels read and write."""

    def __init__(self, device: Device, layout: CacheLayout, num_pages: int) -> None:
        """layout is the cache's. Raises DeviceError if the driver cannot lock the memory."""
        self._memory = device.host_memory(replace(layout, num_pages=num_pages).num_bytes) if num_pages else None
        held = torch.empty(0, dtype=torch.uint8) if self._memory is None else self._memory.bytes
        self.pages = held.view(layout.num_layers, num_pages, layout.page_bytes)
        """uint8 [layers, num_pages, page bytes], like the cache."""

    @property
    def num_pages(self) -> int:
        return self.pages.shape[1]

    def close(self) -> None:
        """Free the memory. Call once, after the device's last use of it."""
        del self.pages
        if self._memory is not None:
            self._memory.free()


def open_pool(device: Device, layout: CacheLayout, link: LinkSpeed, costs: TokenCosts, budget_bytes: int) -> HostPool:
    """Open a pool of `count_host_pages` pages, or of none if the memory cannot be locked; log which, and why."""
    page_bytes = layout.num_layers * layout.page_bytes
    num_pages = count_host_pages(costs, page_bytes, budget_bytes)
    gigabytes = num_pages * page_bytes / 1e9
    try:
        pool = HostPool(device, layout, num_pages)
    except DeviceError as error:
        message = "%.2f GB of host memory cannot be page-locked (%s); pages of preempted sequences are recomputed"
        logger.warning(message, gigabytes, error)
        return HostPool(device, layout, 0)
    if num_pages:
        follows = f"are kept in {gigabytes:.2f} GB of host memory"
    else:
        too_small = f": {budget_bytes / 1e9:.2f} GB of host memory do not hold one page"
        follows = f"are recomputed{too_small if costs.copy_s < costs.compute_s else ''}"
    logger.info("host link: %s; %s; pages of preempted sequences %s", link, costs, follows)
    return pool


_UNIT_BYTES = 16
_PIECE_BYTES = 256 * 4 * _UNIT_BYTES
"""Bytes of a page that one block copies."""

_COPY_PAGES = Kernel("step/copies.cu", "copy_pages", (), num_threads=256)


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    yield _COPY_PAGES


def copy_pages(launcher: Launcher, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy pages of source to pages of destination, both uint8 [num_layers, any number of pages, page_bytes].

    pairs int32 [n, 2]: (source page, destination page); a negative page is padding. If source and destination are the
    same cache, no page may be both. Host memory must be mapped for the device.
    """
    num_layers, _, page_bytes = source.shape
    strides = (np.int64(tensor.stride(0) // _UNIT_BYTES) for tensor in (source, destination))
    grid = (len(pairs), num_layers, -(-page_bytes // _PIECE_BYTES))
    launcher.launch(_COPY_PAGES, grid, source, destination, pairs, np.int32(page_bytes // _UNIT_BYTES), *strides)


MAX_PAGE_MOVES = 1 << 12
"""Moves of each kind (within the cache, from host memory) that travel with a step; the rest go ahead of it."""

_NONE = np.empty((0, 2), np.int32)


class PageMoves:
    """Launches moves in the stream, where they run in order with steps."""

    def __init__(
        self,
        launcher: Launcher,
        cache_pages: Tensor,
        uplink: Uplink,
        pool: HostPool,
        full_pages: Tensor | None = None,
    ) -> None:
        """cache_pages: uint8 [layers, pages, page bytes]. uplink belongs to the steps and holds at least
        2 * MAX_PAGE_MOVES ints. full_pages: of layers whose heads have another size; such pages only move within the
        cache."""
        self._full_pages = full_pages
        self._launcher = launcher
        self._cache_pages = cache_pages
        self._uplink = uplink
        self.pool = pool
        """Host pages of `save` and of restores. May be replaced until their first use."""
        self._num_pages = cache_pages.shape[1]

    def save(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Save pages (`IHostPages.save_pages`). Raises ValueError for a page out of range, or a host page
        given twice."""
        saves = _pairs(pairs)
        _check_range("pages to save", saves[:, 0], self._num_pages)
        _check_range("host pages to save to", saves[:, 1], self.pool.num_pages)
        _check_once("host page {} is saved to twice", saves[:, 1])
        self._send_ahead(self._to_host, saves, 0)

    def pack(self, batch: StepBatch) -> tuple[Ints, Ints]:
        """Return restores and copies, [n, 2] each, to send with the step; launch those beyond MAX_PAGE_MOVES at once.

        Raises ValueError for an invalid batch, before anything is moved.
        """
        if not batch.page_restores and not batch.page_copies:
            return _NONE, _NONE
        restores, copies = _pairs(batch.page_restores), _pairs(batch.page_copies)
        _check_range("pages to copy", copies, self._num_pages)
        _check_range("host pages to restore", restores[:, 0], self.pool.num_pages)
        _check_range("pages to restore to", restores[:, 1], self._num_pages)
        batch.check_page_moves()
        # A copy's source may be a restored page: if some copies go ahead, all restores go ahead of them.
        restores = self._send_ahead(self._to_cache, restores, MAX_PAGE_MOVES if len(copies) <= MAX_PAGE_MOVES else 0)
        return restores, self._send_ahead(self._within_cache, copies, MAX_PAGE_MOVES)

    def run(self, restores: Tensor, copies: Tensor) -> None:
        """Launch what `pack` returned, now on the device: int32 [2 n], flat."""
        if restores.shape[0]:
            self._to_cache(restores)
        if copies.shape[0]:
            self._within_cache(copies)

    def close(self) -> None:
        """Free the host memory and drop the cache; call once, after the device's last use of them."""
        self.pool.close()
        del self._cache_pages, self._full_pages

    def _send_ahead(self, move: Callable[[Tensor], None], pairs: Ints, max_left: int) -> Ints:
        while len(pairs) > max_left:
            move(*self._uplink.send([pairs[:MAX_PAGE_MOVES]]))
            pairs = pairs[MAX_PAGE_MOVES:]
        return pairs

    def _within_cache(self, pairs: Tensor) -> None:
        self._copy(self._cache_pages, self._cache_pages, pairs)
        if self._full_pages is not None:
            self._copy(self._full_pages, self._full_pages, pairs)

    def _to_host(self, pairs: Tensor) -> None:
        self._copy(self._cache_pages, self.pool.pages, pairs)

    def _to_cache(self, pairs: Tensor) -> None:
        self._copy(self.pool.pages, self._cache_pages, pairs)

    def _copy(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        copy_pages(self._launcher, source, destination, pairs.view(-1, 2))


class StateCopies:
    """Checkpoints of slots' states. They have memory of their own: captured steps read states where they are."""

    def __init__(self, launcher: Launcher, states: list[Tensor], num_checkpoints: int) -> None:
        """states: each [layers, slots, …]."""
        self._launcher = launcher
        self._states = [part.flatten(2).view(torch.uint8) for part in states]
        self._checkpoints = [part.new_zeros(part.shape[0], num_checkpoints, part.shape[2]) for part in self._states]

    def pack(self, batch: StepBatch) -> tuple[Ints, Ints]:
        """Return restores and saves, [n, 2] each, to send with the step. Raises ValueError for an invalid batch."""
        if not batch.state_restores and not batch.state_saves:
            return _NONE, _NONE
        restores, saves = _pairs(batch.state_restores), _pairs(batch.state_saves)
        for slots, checkpoints in ((restores[:, 1], restores[:, 0]), (saves[:, 0], saves[:, 1])):
            _check_range("slots of checkpoints", slots, self._states[0].shape[1])
            _check_range("checkpoints", checkpoints, self._checkpoints[0].shape[1])
        return restores, saves

    def restore(self, pairs: Tensor) -> None:
        """Launch restores, now on the device: int32 [2 n], flat."""
        self._copy(self._checkpoints, self._states, pairs)

    def save(self, pairs: Tensor) -> None:
        self._copy(self._states, self._checkpoints, pairs)

    def _copy(self, sources: list[Tensor], destinations: list[Tensor], pairs: Tensor) -> None:
        if len(pairs):
            for source, destination in zip(sources, destinations, strict=True):
                copy_pages(self._launcher, source, destination, pairs.view(-1, 2))


def _pairs(pairs: tuple[tuple[int, int], ...]) -> Ints:
    return np.array(pairs, np.int32).reshape(-1, 2)


def _check_range(what: str, ids: Ints, num_available: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= num_available):
        raise ValueError(f"{what} are {ids.min()} … {ids.max()}; there are {num_available}")


def _check_once(what: str, ids: Ints) -> None:
    found, counts = np.unique(ids, return_counts=True)
    if len(found) < len(ids):
        raise ValueError(what.format(found[counts > 1][0]))
