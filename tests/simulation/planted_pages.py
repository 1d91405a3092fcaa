"""Bugs to plant in pages, prefixes, the wait queue and the plan's arrays."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from penstock.backend.engine import coalescer as coalescer_module
from penstock.backend.engine.steps.batch_builder import BatchBuilder
from penstock.backend.kv_cache import prefix_cache as prefix_cache_module
from penstock.backend.kv_cache.host_offload import HostOffload
from penstock.backend.kv_cache.page_hash import extend_page_hashes
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.kv_cache.prefix_cache import Prefix, PrefixCache
from penstock.backend.kv_cache.state_checkpoints import StateCheckpoints
from penstock.backend.scheduling.running import RunningSequences
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.scheduling.wait_queue import WaitQueue
from penstock.backend.sequences.sequence import KvState, Sequence
from penstock.shm.messages import PromptHeader
from tests.simulation.planting import Plant, wrap

if TYPE_CHECKING:
    from penstock.backend.forward_pass import StepBatch


def _gives_back_twice(give_back: Any, pool: PagePool, pages: list[int]) -> None:
    give_back(pool, pages)
    give_back(pool, [page for page in pages if pool.num_holders(page)])


def _adapters_are_late(adapters_of: Any, builder: BatchBuilder, slots: Any) -> Any:
    """Only slots that had no adapter before are told of a new one."""
    if builder._adapters is not None:
        seen = vars(builder).setdefault("seen", {})
        for slot in slots.tolist():
            builder._adapters[slot] = seen.setdefault(slot, builder._adapters[slot])
    return adapters_of(builder, slots)


def _names_pages_when_planned(plan_step: Any, scheduler: Scheduler) -> Plan:
    plan: Plan = plan_step(scheduler)
    for row in plan.rows():
        if row.end <= len(row.sequence.tokens):
            scheduler.note_computed(row.sequence, row.end)
    return plan


def _with_first_embeddings(batch: StepBatch) -> StepBatch:
    given = [replace(part, values=replace(part.values, first=0)) for part in batch.embeddings]  # type: ignore[type-var]
    return replace(batch, embeddings=tuple(given))


def _slot_is_lost(stop: Any, running: RunningSequences, sequence: Sequence, **options: Any) -> Any:
    sequence.slot, slot = None, sequence.slot
    awaited = stop(running, sequence, **options)
    sequence.slot = slot
    return awaited


def _page_hashes_without_salt(
    extend: Any, keys: list[bytes], tokens: Any, num_tokens: int, page_size: int, _salt: bytes
) -> None:
    extend(keys, tokens, num_tokens, page_size, b"")


def _page_hashes_without_chain(keys: list[bytes], tokens: Any, num_tokens: int, page_size: int, salt: bytes) -> None:
    for page in range(len(keys), num_tokens // page_size):
        content = tokens[page * page_size : (page + 1) * page_size].tobytes()
        keys.append(hashlib.blake2b(salt + content, digest_size=16).digest())


def _copies_a_token_too_many(find: Any, prefixes: PrefixCache, sequence: Sequence) -> Prefix:
    found: Prefix = find(prefixes, sequence)
    num_left = min(prefixes._page_size, len(sequence.tokens) - len(found.pages) * prefixes._page_size) - 1
    return (
        replace(found, num_copied_tokens=found.num_copied_tokens + 1)
        if 0 < found.num_copied_tokens < num_left
        else found
    )


def _copies_what_is_planned(find: Any, prefixes: PrefixCache, sequence: Sequence) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sequence, "num_applied", property(lambda other: min(other.num_computed, len(other.tokens))))
        return find(prefixes, sequence)


def _page_restores_stay_when_their_row_is_dropped(keep: Any, plan: Plan, kept: list[int]) -> Plan:
    result: Plan = keep(plan, kept)
    result.page_restores = plan.page_restores
    return result


def _restored_counts_as_computed(
    start: Any, running: RunningSequences, sequence: Sequence, prefix: Any, *args: Any, **options: Any
) -> None:
    start(running, sequence, prefix, *args, **options)
    sequence.kv.num_prefilled = prefix.num_full_pages * running._page_size


def _places_are_not_kept_for_reading(find: Any, host: HostOffload) -> int | None:
    host._restored.clear()
    return find(host)  # type: ignore[no-any-return]


def _page_copies_stay_when_their_row_is_dropped(keep: Any, plan: Plan, kept: list[int]) -> Plan:
    result: Plan = keep(plan, kept)
    result.page_copies = plan.page_copies
    return result


def _sources_are_not_pinned(
    start: Any,
    running: RunningSequences,
    sequence: Sequence,
    prefix: Prefix,
    *args: Any,
    are_idle: bool,
    **options: Any,
) -> None:
    """Sources that are idle, or those that a sequence holds."""
    pin, num_pinned = PagePool.pin, len(running._copy_sources)
    is_spared = prefix.copy_source >= 0 and running.pool.is_idle(prefix.copy_source) == are_idle
    with pytest.MonkeyPatch.context() as patch:
        if is_spared:
            patch.setattr(PagePool, "pin", lambda pool, page: None if page == prefix.copy_source else pin(pool, page))
        start(running, sequence, prefix, *args, **options)
    if is_spared:
        del running._copy_sources[num_pinned:]


def _suspect_parts_are_kept(invalidate: Any, prefixes: PrefixCache, salt: bytes) -> None:
    invalidate(prefixes, salt)
    for sequences in prefixes._filling.values():
        for sequence in sequences:
            sequence.kv.is_suspect = False


def _tries_without_going_back(_: Any, scheduler: Scheduler, chunks: list[Any]) -> None:
    for sequence, _length in chunks:
        sequence.rewind(sequence.num_computed)
    scheduler._bisections.extend([chunk] for chunk in chunks)


def _evicts_what_is_held(_: Any, pool: PagePool, page: int) -> None:
    pool._num_holders[page] += 1


def _finds_the_whole_prompt(find: Any, prefixes: PrefixCache, sequence: Sequence) -> Any:
    sequence.tokens.append(0)
    try:
        return find(prefixes, sequence)
    finally:
        sequence.tokens.pop()


def _page_table_keeps_a_former_owners_pages(clear: Any, builder: BatchBuilder, sequence: Sequence) -> None:
    known = int(builder._num_pages[sequence.slot])
    builder._num_pages[sequence.slot] = min(known, len(sequence.kv.pages))


def _goes_to_the_head_of_the_queue(put: Any, queue: WaitQueue, sequence: Sequence) -> None:
    sequence.rank = -sequence.order
    put(queue, sequence)


def _never_unparks_in_order(unpark: Any, queue: WaitQueue, keys: Any) -> None:
    unpark(queue, list(keys)[:1])


def _states_are_findable_before_their_step_ends(
    save: Any, states: StateCheckpoints, sequence: Sequence, kv: KvState
) -> Any:
    num_tokens, saved = kv.next_border, save(states, sequence, kv)
    if saved is not None and num_tokens <= len(sequence.tokens):
        extend_page_hashes(kv.page_hashes, sequence.tokens, num_tokens, states._page_size, sequence.salt)
        states.note_computed(sequence, num_tokens)
    return saved


def _state_saves_stay_when_their_row_is_dropped(keep: Any, plan: Plan, kept: list[int]) -> Plan:
    result: Plan = keep(plan, kept)
    result.state_saves = plan.state_saves
    return result


PAGE_BUGS: dict[str, Plant] = {
    "pages are given back twice": wrap(PagePool, "release", _gives_back_twice),
    "a parked sequence is never unparked": wrap(WaitQueue, "unpark", lambda *_: None),
    "only the first of several keys unparks sequences": wrap(WaitQueue, "unpark", _never_unparks_in_order),
    "a page is indexed before its step is applied": wrap(Scheduler, "plan", _names_pages_when_planned),
    "tenants share pages": wrap(prefix_cache_module, "extend_page_hashes", _page_hashes_without_salt),
    "a stopped sequence keeps its slot": wrap(RunningSequences, "stop", _slot_is_lost),
    "page hashes ignore the pages before": lambda patch: patch.setattr(
        prefix_cache_module, "extend_page_hashes", _page_hashes_without_chain
    ),
    "one token too many is taken from a copied page": wrap(PrefixCache, "find", _copies_a_token_too_many),
    "the common tokens of two pages are overestimated": wrap(
        prefix_cache_module,
        "count_common_tokens",
        lambda count, *texts: min(count(*texts) + 1, *(len(text) // 4 for text in texts)),
    ),
    "tokens are copied before their step is applied": wrap(PrefixCache, "find", _copies_what_is_planned),
    "tenants copy from each other's pages": wrap(
        prefix_cache_module,
        "_parent_hash",
        lambda key, sequence, num_pages: key(sequence, num_pages) if num_pages else b"",
    ),
    "pages are not copied": wrap(BatchBuilder, "build", lambda build, *args: replace(build(*args), page_copies=())),
    "a chunk's embeddings are the prompt's first": wrap(
        BatchBuilder, "build", lambda build, *args: _with_first_embeddings(build(*args))
    ),
    "pages of embeddings are found by their token ids": lambda patch: patch.setattr(
        coalescer_module.secrets, "token_bytes", bytes
    ),
    "pages are not restored": wrap(BatchBuilder, "build", lambda build, *args: replace(build(*args), page_restores=())),
    "a page restore outlives its row": wrap(Plan, "keep", _page_restores_stay_when_their_row_is_dropped),
    "restored pages count as computed before they are restored": wrap(
        RunningSequences, "start", _restored_counts_as_computed
    ),
    "a host place is overwritten before the step has read it": wrap(
        HostOffload, "_free_host_page", _places_are_not_kept_for_reading
    ),
    "pages with bad logits stay on the host": wrap(HostOffload, "invalidate_tenant", lambda *_: None),
    "a page copy outlives its row": wrap(Plan, "keep", _page_copies_stay_when_their_row_is_dropped),
    "a page is evicted while it is to be copied": wrap(
        RunningSequences, "start", partial(_sources_are_not_pinned, are_idle=True)
    ),
    "a preempted sequence gives up a page that is to be copied": wrap(
        RunningSequences, "start", partial(_sources_are_not_pinned, are_idle=False)
    ),
    "adapters share pages": lambda patch: patch.setattr(
        PromptHeader, "own_salt", property(lambda message: message.salt)
    ),
    "a slot keeps the adapter of its previous sequence": wrap(BatchBuilder, "_adapters_of", _adapters_are_late),
    "partial pages with bad logits stay findable": wrap(PrefixCache, "invalidate_tenant", _suspect_parts_are_kept),
    "a failed step counts as computed": wrap(Scheduler, "bisect", _tries_without_going_back),
    "a page found again can still be evicted": wrap(PagePool, "hold", _evicts_what_is_held),
    "a prefix hit leaves nothing to compute": wrap(PrefixCache, "find", _finds_the_whole_prompt),
    "the page table keeps the pages of the slot's previous sequence": wrap(
        BatchBuilder, "_clear", _page_table_keeps_a_former_owners_pages
    ),
    "the last request to arrive goes first": wrap(WaitQueue, "put", _goes_to_the_head_of_the_queue),
    "a state can be found before its step has ended": wrap(
        StateCheckpoints, "_save", _states_are_findable_before_their_step_ends
    ),
    "a state save outlives its row": wrap(Plan, "keep", _state_saves_stay_when_their_row_is_dropped),
    "states are not restored": wrap(
        BatchBuilder, "build", lambda build, *args: replace(build(*args), state_restores=())
    ),
    "pages with bad logits stay findable": lambda patch: patch.setattr(
        PrefixCache, "invalidate_tenant", lambda _prefix_cache, _salt: None
    ),
}
