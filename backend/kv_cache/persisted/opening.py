"""Opens the memory of `--persist-kv` when a backend starts."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from penstock.backend.checkpoint.fingerprint import packing_fingerprint
from penstock.backend.errors import NoRoomBeside, StartupError
from penstock.backend.forward_pass.extensions import IPersistsPages
from penstock.backend.kv_cache.budget.kv_plan import KvPlan
from penstock.backend.kv_cache.page_hash import use_secret
from penstock.backend.kv_cache.persisted.page_store import PageStore, PageStoreError
from penstock.process.options import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backend.forward_pass import IBatchedForwardPass
    from penstock.backend.kv_cache.budget.memory import MemoryInfo
    from penstock.backend.kv_cache.budget.whole_plan import WholePlan

logger = logging.getLogger("penstock.backend")


def open_store(
    fd: int | None,
    forward_pass: IBatchedForwardPass,
    plan: KvPlan | WholePlan,
    model_dir: Path,
    fingerprint: str,
    memory: MemoryInfo,
    *,
    beside_another: bool,
) -> PageStore | None:
    """Give the pass host pages in the memory of the fd.

    Returns None, with a line in the log, if its pages cannot be kept. Without an fd no pages are kept. fingerprint is
    the model's, memory the host's. Call it before a page is hashed. Raises StartupError; NoRoomBeside if memory is
    missing beside another backend.
    """
    if fd is None:
        return None
    spec = forward_pass.spec
    if not isinstance(plan, KvPlan) or not isinstance(forward_pass, IPersistsPages):
        logger.info("pages end with this process: its forward pass cannot leave them")
        return None
    if spec.state_bytes_per_sequence or plan.groups.has_windows:
        logger.info("pages end with this process: they alone do not say how a sequence of this model goes on")
        return None
    size, page_bytes = os.fstat(fd), plan.page_size_tokens * plan.bytes_per_token
    if (missing := size.st_size - 512 * size.st_blocks) > memory.free_bytes:
        no_memory = NoRoomBeside if beside_another else StartupError
        raise no_memory(
            f"--persist-kv is {format_size(size.st_size)}; {format_size(max(0, memory.free_bytes))} are free on "
            f"{memory.name}, {format_size(missing)} are needed: lower --persist-kv"
        )
    key = packing_fingerprint(model_dir, (fingerprint, plan.kv_dtype, page_bytes, plan.page_size_tokens))
    try:
        store = PageStore(fd, bytes.fromhex(key), page_bytes)
    except PageStoreError as error:
        raise StartupError(f"--persist-kv: {error}") from None
    use_secret(store.secret)
    forward_pass.persist_pages(store)
    logger.info(
        "pages are kept for the next backend: %d of %s; %d of an earlier one are there",
        store.num_places, format_size(page_bytes), len(store.found),
    )  # fmt: skip
    return store
