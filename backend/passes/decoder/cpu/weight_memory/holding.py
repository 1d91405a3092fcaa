"""Weights that outlive the process which packed them: it leaves them in a mailbox, and the next one maps them."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from typing import TYPE_CHECKING, TypeVar

from penstock.backend.checkpoint.weight_shapes import WeightShapes
from penstock.backend.passes.decoder.cpu.weight_memory.anonymous import AnonymousMemory
from penstock.backend.passes.decoder.cpu.weight_memory.held import FilledMemory, HeldBlocks, HeldMemory
from penstock.backend.passes.decoder.cpu.weight_memory.manifest import HeldWeightsError
from penstock.backend.passes.decoder.cpu.weight_memory.watch import WatchedWeights
from penstock.shm.memory.fd_mailbox import FdMailbox
from penstock.shm.process.options import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from penstock.backend.checkpoint.decoder_config import DecoderConfig
    from penstock.backend.passes.decoder.cpu.weight_memory.anonymous import WeightMemory
    from penstock.backend.passes.decoder.model import Weights

logger = logging.getLogger("penstock.backend")

_CHECKS_AT_START_S = 0.1

P = TypeVar("P")


def load_or_map(
    mailbox: FdMailbox,
    fingerprint: str,
    config: DecoderConfig,
    build: Callable[[Weights, torch.dtype, WeightMemory], P],
    load: Callable[[WeightMemory], tuple[P, torch.dtype]],
) -> tuple[P, WatchedWeights | None]:
    """Return build's pass over weights that are held, or load's, whose weights are held from now on.

    Another process that wants the same weights waits meanwhile, and then maps them. Raises what load raises.
    """
    with mailbox.locked():
        held = find_held(mailbox, fingerprint)
        if held is not None:
            try:
                return _map(mailbox, held, config, build)
            except HeldWeightsError as error:
                logger.error("the held weights are dropped, and loaded from their files: %s", error)
        elif not mailbox.is_empty:
            logger.info("the held weights are of another checkpoint, other options or other code: they are loaded anew")
        mailbox.clear()  # before there is memory for the next ones
        return _fill(mailbox, fingerprint, load)


def find_held(mailbox: FdMailbox, fingerprint: str) -> int | None:
    """An fd of memory with these weights, which the caller closes."""
    fd = mailbox.find()
    if fd is None:
        return None
    try:
        found = HeldMemory(fd).fingerprint
    except HeldWeightsError as error:
        logger.error("the held weights cannot be used: %s", error)
        found = None
    if found == fingerprint:
        return fd
    os.close(fd)
    return None


def _map(
    mailbox: FdMailbox, fd: int, config: DecoderConfig, build: Callable[[Weights, torch.dtype, WeightMemory], P]
) -> tuple[P, WatchedWeights]:
    """Takes the fd over. Raises HeldWeightsError."""
    try:
        memory = HeldMemory(fd)
        blocks = HeldBlocks(fd, memory.num_bytes, memory.block_sums)
    finally:
        os.close(fd)
    try:
        num_checked = _check_some(blocks)
        memory.populate()
        built = build(WeightShapes(config), memory.dtype, memory)
        memory.check_all_placed()
    except BaseException:
        blocks.close()
        raise
    logger.info(
        "mapped %s of packed weights that an earlier backend left; %d of %d blocks are checked",
        format_size(memory.num_bytes), num_checked, len(blocks),
    )  # fmt: skip
    return built, WatchedWeights(mailbox, blocks, is_mapped=True)


def _check_some(blocks: HeldBlocks) -> int:
    """Check blocks at random for a moment, and return their number. Raises HeldWeightsError."""
    end_s = time.monotonic() + _CHECKS_AT_START_S
    num_checked = 0
    for block in random.sample(range(len(blocks)), len(blocks)):
        blocks.check(block)
        num_checked += 1
        if time.monotonic() >= end_s:
            break
    return num_checked


def _fill(
    mailbox: FdMailbox, fingerprint: str, load: Callable[[WeightMemory], tuple[P, torch.dtype]]
) -> tuple[P, WatchedWeights | None]:
    with contextlib.closing(FilledMemory()) as memory:
        try:
            loaded, dtype = load(memory)
            blocks = memory.finish(fingerprint, dtype)
            mailbox.leave(memory.fd)
        except OSError as error:
            logger.warning("the weights cannot be held: %s; the next start loads them again", error)
            loaded, _ = load(AnonymousMemory())
            return loaded, None
    logger.info("%s of packed weights are held for the next backend", format_size(blocks.num_bytes))
    return loaded, WatchedWeights(mailbox, blocks, is_mapped=False)
