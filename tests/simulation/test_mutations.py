"""The simulator finds bugs: each of these is planted, and must be found within few worlds."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from backend import scheduler as scheduler_module
from backend.batch_builder import BatchBuilder
from backend.coalescer import Coalescer, ShareKey
from backend.engine import Engine
from backend.executor import StepResult
from backend.forward_pass import NOT_FINITE
from backend.page_pool import PagePool
from backend.requests import Requests
from backend.scheduler import Row, Scheduler
from backend.sequence import Sequence, Subscriber
from backend.waiting_room import WaitingRoom
from tests.simulation.world import run_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    Plant = Callable[[pytest.MonkeyPatch], None]

_MAX_SEEDS = 1000


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Plant:
    """Puts wrapper(original, *args) in the place of owner.name."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **options: wrapper(original, *args, **options))

    return plant


def _gives_back_twice(give_back: Any, pool: PagePool, pages: list[int]) -> None:
    give_back(pool, pages)
    give_back(pool, [page for page in pages if pool.num_holders(page)])


def _forgets_who_is_parked(_: Any, scheduler: Scheduler, sequence: Sequence, keys: list[bytes]) -> None:
    for key in keys:
        if scheduler._computing.get(key) is sequence:
            del scheduler._computing[key]


def _names_pages_when_planned(advance: Any, scheduler: Scheduler, sequence: Sequence, num_tokens: int) -> Row:
    row: Row = advance(scheduler, sequence, num_tokens)
    if row.start + row.num_tokens <= len(sequence.tokens):
        scheduler.note_computed(row)
    return row


def _keeps_who_cancelled(_: Any, requests: Requests, sequence: Sequence, subscriber: Subscriber) -> None:
    del requests._open[subscriber.frontend][subscriber.request_id]
    if not requests._open[subscriber.frontend]:
        del requests._open[subscriber.frontend]
    requests.num_open -= 1
    if len(sequence.subscribers) == 1:
        sequence.unsubscribe(subscriber)
        requests._coalescer.withdraw(sequence)
        requests._scheduler.remove(sequence)


def _joins_what_has_ended(patch: pytest.MonkeyPatch) -> None:
    def forget_key_only(coalescer: Coalescer, sequence: Sequence) -> None:
        coalescer._keys.pop(sequence, None)

    patch.setattr(Coalescer, "withdraw", forget_key_only)
    patch.setattr(Coalescer, "find", lambda coalescer, key: coalescer._sequences.get(key))


def _keeps_the_limit_of_who_left(unsubscribe: Any, sequence: Sequence, subscriber: Subscriber) -> None:
    limit = sequence.max_total_tokens
    unsubscribe(sequence, subscriber)
    sequence.max_total_tokens = limit


def _slot_is_lost(stop: Any, scheduler: Scheduler, sequence: Sequence) -> None:
    sequence.slot, slot = None, sequence.slot
    stop(scheduler, sequence)
    sequence.slot = slot


def _page_keys_without_salt(
    extend: Any, keys: list[bytes], tokens: Any, num_tokens: int, page_size: int, _salt: bytes
) -> None:
    extend(keys, tokens, num_tokens, page_size, b"")


def _page_keys_without_chain(keys: list[bytes], tokens: Any, num_tokens: int, page_size: int, salt: bytes) -> None:
    for page in range(len(keys), num_tokens // page_size):
        content = tokens[page * page_size : (page + 1) * page_size].tobytes()
        keys.append(hashlib.blake2b(salt + content, digest_size=16).digest())


def _rewinds_only_restarts(rewind: Any, sequence: Sequence, num_computed: int) -> None:
    if num_computed == 0:
        rewind(sequence, num_computed)


def _slot_is_not_told_of_a_restart(rewind: Any, sequence: Sequence, num_computed: int) -> None:
    rewind(sequence, num_computed)
    sequence.needs_slot_init = False


def _steps_in_flight_still_count(rewind: Any, sequence: Sequence, num_computed: int) -> None:
    rewind(sequence, num_computed)
    sequence.generation -= 1


def _waiting_requests_never_expire(expire: Any, requests: Requests) -> None:
    waiting = [
        subscriber
        for sequence in requests._scheduler._waiting.sequences()
        for subscriber in sequence.subscribers
        if subscriber.deadline_s is not None
    ]
    deadlines = [subscriber.deadline_s for subscriber in waiting]
    for subscriber in waiting:
        subscriber.deadline_s = None
    expire(requests)
    for subscriber, deadline_s in zip(waiting, deadlines, strict=True):
        subscriber.deadline_s = deadline_s


def _replays_one_too_few(replay: Any, requests: Requests, sequence: Sequence, subscriber: Subscriber) -> None:
    subscriber.next_index += 1
    replay(requests, sequence, subscriber)


def _repeats_what_was_brought(give: Any, requests: Requests, sequence: Sequence, s: Subscriber, *token: Any) -> bool:
    s.next_index = min(s.next_index, token[0])
    return bool(give(requests, sequence, s, *token))


def _evicts_what_is_held(_: Any, pool: PagePool, page: int) -> None:
    pool._num_holders[page] += 1


def _finds_the_whole_prompt(find: Any, scheduler: Scheduler, sequence: Sequence) -> Any:
    sequence.tokens.append(0)
    try:
        return find(scheduler, sequence)
    finally:
        sequence.tokens.pop()


def _page_table_keeps_a_former_owners_pages(build: Any, builder: BatchBuilder, rows: list[Row]) -> Any:
    known = list(builder._num_pages)
    for row in rows:
        if row.takes_slot and row.sequence.slot is not None:
            known[row.sequence.slot] = min(known[row.sequence.slot], len(row.sequence.pages))
    fresh = [row for row in rows if row.takes_slot]
    for row in fresh:
        row.takes_slot = False
    batch = build(builder, rows)
    for row in fresh:
        row.takes_slot = True
    inits = tuple(build(builder, fresh).slot_inits) if fresh else ()
    return replace(batch, slot_inits=inits)


def _drops_one_request_of_a_dead_frontend(_: Any, requests: Requests, frontend: int) -> None:
    for sequence, subscriber in list(requests._open.get(frontend, {}).values())[:1]:
        requests._leave(sequence, subscriber)
        requests._board.requests_cancelled += 1


def _goes_to_the_head_of_the_queue(put: Any, room: WaitingRoom, sequence: Sequence) -> None:
    sequence.rank = -sequence.order
    put(room, sequence)


def _a_bad_row_spoils_the_step(apply: Any, engine: Engine, result: StepResult) -> None:
    if NOT_FINITE in result.token_ids:
        result = replace(result, token_ids=[NOT_FINITE] * len(result.token_ids))
    apply(engine, result)


def _never_unparks_in_order(unpark: Any, room: WaitingRoom, keys: Any) -> None:
    unpark(room, list(keys)[:1])


PLANTED: dict[str, Plant] = {
    "pages are given back twice": _wrap(PagePool, "give_back", _gives_back_twice),
    "who waits for a prefix is forgotten": _wrap(Scheduler, "_end_computing", _forgets_who_is_parked),
    "only the first of several keys lets go of who waits": _wrap(WaitingRoom, "unpark", _never_unparks_in_order),
    "a page is named before its step is applied": _wrap(Scheduler, "_advance", _names_pages_when_planned),
    "a cancelled subscriber goes on listening": _wrap(Requests, "_leave", _keeps_who_cancelled),
    "a sequence that has ended takes on listeners": _joins_what_has_ended,
    "tenants share sequences": _wrap(ShareKey, "of", lambda of, _salt, *rest: of(b"", *rest)),
    "tenants share pages": _wrap(scheduler_module, "extend_page_keys", _page_keys_without_salt),
    "different seeds share a sequence": _wrap(
        ShareKey, "of", lambda of, salt, prompt, sampling: of(salt, prompt, replace(sampling, seed=0))
    ),
    "different penalties share a sequence": _wrap(
        ShareKey, "of", lambda of, salt, prompt, sampling: of(salt, prompt, replace(sampling, presence_penalty=0.0))
    ),
    "a stopped sequence keeps its slot": _wrap(Scheduler, "_stop_running", _slot_is_lost),
    "page keys ignore what came before": lambda patch: patch.setattr(
        scheduler_module, "extend_page_keys", _page_keys_without_chain
    ),
    "a sequence that goes on after a stop is not rewound": _wrap(Sequence, "rewind", _rewinds_only_restarts),
    "the slot is not told of a restart": _wrap(Sequence, "rewind", _slot_is_not_told_of_a_restart),
    "steps in flight count after a restart": _wrap(Sequence, "rewind", _steps_in_flight_still_count),
    "priorities are turned round": _wrap(
        Requests,
        "submit",
        lambda submit, requests, event: submit(
            requests, replace(event, submit=msgspec.structs.replace(event.submit, priority=-event.submit.priority))
        ),
    ),
    "waiting requests never expire": _wrap(Requests, "expire", _waiting_requests_never_expire),
    "a replay leaves out the first token": _wrap(Requests, "_replay", _replays_one_too_few),
    "a resumed stream begins again": _wrap(Requests, "_give", _repeats_what_was_brought),
    "tokens are computed for who has left": _wrap(Sequence, "unsubscribe", _keeps_the_limit_of_who_left),
    "a page found again can still be evicted": _wrap(PagePool, "hold", _evicts_what_is_held),
    "a prefix hit leaves nothing to compute": _wrap(Scheduler, "_find_prefix", _finds_the_whole_prompt),
    "the page table keeps a former owner's pages": _wrap(
        BatchBuilder, "build", _page_table_keeps_a_former_owners_pages
    ),
    "a dead frontend's requests live on": _wrap(Requests, "drop_frontend", _drops_one_request_of_a_dead_frontend),
    "the last one to come goes first": _wrap(WaitingRoom, "put", _goes_to_the_head_of_the_queue),
    "membership is bound when planned": lambda patch: patch.setattr(Row, "is_stale", False),
    "bad logits fail the whole step": _wrap(Engine, "_apply", _a_bad_row_spoils_the_step),
    "bad logits leave their pages behind": lambda patch: patch.setattr(
        Scheduler, "distrust", lambda _scheduler, _sequence: None
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    logging.disable(logging.CRITICAL)
    try:
        for seed in range(_MAX_SEEDS):
            try:
                run_seed(seed)
            except Exception:  # noqa: BLE001 - found, by whichever check
                return
    finally:
        logging.disable(logging.NOTSET)
    pytest.fail(f"{_MAX_SEEDS} worlds did not find that {name}")
