"""Makes the scheduler of a pass with a KV cache, the board, and the publishers of its pages."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

from penstock.backend.engine.interfaces import ISequenceScheduler
from penstock.backend.engine.loop import Engine
from penstock.backend.engine.steps.batch_builder import BatchBuilder, WholeBatchBuilder
from penstock.backend.engine.steps.step_timing import StepTiming
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import IBatchedForwardPass, PassOptions
from penstock.backend.forward_pass.extensions import ICheckpointsStates, IHostPages
from penstock.backend.kv_cache.budget.kv_plan import KvPlan
from penstock.backend.kv_cache.budget.memory import host_memory
from penstock.backend.kv_cache.budget.whole_plan import WholePlan
from penstock.backend.kv_cache.earlier_texts import EarlierTexts
from penstock.backend.kv_cache.hand_over import HandOverMemory, open_hand_over
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.kv_cache.page_store import PageStore, open_store
from penstock.backend.kv_cache.state_checkpoints import StateCheckpoints
from penstock.backend.options import BackendOptions
from penstock.backend.scheduling.drafting import MAX_DRAFTS, MAX_STATE_DRAFTS, Drafting
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.backend.scheduling.whole_scheduler import WholeScheduler
from penstock.shm.link.kv_event_publisher import CannotPublish, KvEventPublisher
from penstock.shm.memory.board import BackendBoard
from penstock.shm.memory.page_digest import PageDigestWriter, digest_bytes
from penstock.shm.messages import ModelCard


def create_kv_events(
    options: BackendOptions, settings: PassOptions, plan: KvPlan | WholePlan
) -> KvEventPublisher | None:
    """Raises StartupError."""
    if options.kv_events is None:
        return None
    if not plan.num_pages:
        raise StartupError(f"--kv-events is {options.kv_events}, but this model has no KV cache; leave it out")
    medium = "CPU" if settings.device == "cpu" else "GPU"
    try:
        return KvEventPublisher(options.kv_events, options.kv_events_topic, plan.page_size_tokens, medium=medium)
    except CannotPublish as error:
        raise StartupError(f"--kv-events {error}") from error


def create_cache(
    forward_pass: IBatchedForwardPass, num_pages: int, page_size_tokens: int, kv_dtype: str, num_checkpoints: int
) -> None:
    """Allocate pages, and checkpoints if the pass keeps any."""
    forward_pass.create_cache(num_pages, page_size_tokens, kv_dtype)
    if isinstance(forward_pass, ICheckpointsStates):
        forward_pass.create_checkpoints(num_checkpoints)


def count_host_pages(plan: KvPlan | WholePlan, forward_pass: IBatchedForwardPass) -> int:
    """Return the number of host pages in addition to the plan's pages."""
    # A page without its sequence's state is useless, and a page behind a window is soon evicted.
    if isinstance(plan, WholePlan) or plan.groups.has_windows or (plan.state_bytes and not plan.num_checkpoints):
        return 0
    return forward_pass.num_host_pages if isinstance(forward_pass, IHostPages) else 0


def open_pages(
    options: BackendOptions,
    forward_pass: IBatchedForwardPass,
    plan: KvPlan | WholePlan,
    model_dir: Path,
    card: ModelCard,
) -> PageStore | HandOverMemory | None:
    """Open the memory of pages that outlive this backend. Raises StartupError."""
    fd, memory, beside = options.persist_kv_fd, host_memory(), options.beside_another
    fingerprint = f"{card.fingerprint} {options.max_context}"  # LongRoPE rotates keys by the longest context
    if fd is None:
        return open_hand_over(options.hand_over_fds, forward_pass, plan, model_dir, fingerprint)
    return open_store(fd, forward_pass, plan, model_dir, fingerprint, memory, beside_another=beside)


def create_board(
    plan: KvPlan | WholePlan, max_waiting: int, token_step_s: float | None, num_host_pages: int
) -> BackendBoard:
    board = BackendBoard.create(digest_bytes(plan.num_pages + num_host_pages))
    board.pid = os.getpid()
    board.pages_total = plan.num_pages
    board.page_size_tokens = plan.page_size_tokens
    board.max_waiting = max_waiting
    board.token_step_us = 0 if token_step_s is None else round(1e6 * token_step_s)
    return board


def leave_on_signal(engine: Engine, scheduler: ISequenceScheduler) -> None:
    """SIGUSR1 says that a successor is ready."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if isinstance(scheduler, Scheduler):
            engine.call_soon(scheduler.leave_pages)

    signal.signal(signal.SIGUSR1, on_signal)


def _checkpoints(
    plan: KvPlan, forward_pass: IBatchedForwardPass, store: PageStore | HandOverMemory | None
) -> StateCheckpoints | None:
    """None if the pass keeps no state."""
    if not forward_pass.spec.state_bytes_per_sequence:
        return None
    places = None if store is None else store.states
    pool, state_bytes = PagePool(plan.num_checkpoints, store=places), forward_pass.spec.state_bytes_per_sequence
    return StateCheckpoints(pool, plan.page_size_tokens, state_bytes=state_bytes)


def uses_drafts(options: BackendOptions, forward_pass: IBatchedForwardPass) -> bool:
    """Whether to guess tokens: by default only where that changes none. Raises StartupError."""
    kind, spec = options.speculation, forward_pass.spec
    if kind == "ngram" and not spec.verifies_drafts:
        raise StartupError(
            f"--speculation is ngram, but {type(forward_pass).__name__} cannot verify guessed tokens; leave it out"
        )
    is_chosen = kind != "auto" or options.draft_model is not None
    return spec.verifies_drafts and kind != "none" and (is_chosen or not spec.rounds_drafts)


def create_scheduler(
    plan: KvPlan | WholePlan,
    settings: PassOptions,
    forward_pass: IBatchedForwardPass,
    options: BackendOptions,
    board: BackendBoard,
    kv_events: KvEventPublisher | None,
    store: PageStore | HandOverMemory | None,
    step_timing: StepTiming,
) -> tuple[ISequenceScheduler, BatchBuilder | WholeBatchBuilder]:
    """Create the scheduler. Raises StartupError.

    The table behind the board tells frontends with several backends which one has a prompt's beginning.
    """
    has_drafts = uses_drafts(options, forward_pass)
    if isinstance(plan, WholePlan):
        return WholeScheduler(plan.max_rows, plan.step_tokens), WholeBatchBuilder()
    names = PageDigestWriter(board.behind, plan.page_size_tokens)
    num_host_pages = count_host_pages(plan, forward_pass)
    drafting = None
    if has_drafts:
        max_drafts = MAX_STATE_DRAFTS if plan.state_bytes else MAX_DRAFTS
        drafting = Drafting(step_timing, EarlierTexts(plan.num_pages, plan.page_size_tokens), max_drafts)
    observers, texts = () if kv_events is None else (kv_events,), None if drafting is None else drafting.texts
    scheduler = Scheduler(
        PagePool(plan.num_pages, num_host_pages, observers, store, names, texts),
        plan.page_size_tokens,
        settings.max_running,
        settings.max_batch_tokens,
        num_plans_ahead=options.batch_channel_capacity,
        states=_checkpoints(plan, forward_pass, store),
        kv_windows=forward_pass.spec.kv_windows,
        drafting=drafting,
    )
    pages, has_adapters = plan.max_pages_per_sequence, bool(settings.adapters) or options.lora_dir is not None
    builder = BatchBuilder(
        settings.max_running,
        pages,
        plan.groups.count,
        has_adapters=has_adapters,
        has_picture_axes=forward_pass.spec.has_picture_axes,
    )
    return scheduler, builder
