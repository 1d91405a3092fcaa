"""The simulator finds bugs: each of these is planted, and must be found within few worlds."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock.backend.engine import intake as intake_module
from penstock.backend.engine import launched_step as step_module
from penstock.backend.engine.batch_builder import BatchBuilder
from penstock.backend.engine.cancellation import Canceller
from penstock.backend.engine.coalescer import Coalescer, ShareKey
from penstock.backend.engine.delivery import Delivery
from penstock.backend.engine.intake import Intake
from penstock.backend.engine.launched_step import StepResult
from penstock.backend.engine.loop import Engine
from penstock.backend.engine.open_requests import OpenRequests
from penstock.backend.engine.step_timing import StepTiming
from penstock.backend.forward_pass import NOT_FINITE
from penstock.backend.kv_cache import prefix_cache as prefixes_module
from penstock.backend.kv_cache.host_offload import HostOffload
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.kv_cache.prefix_cache import Prefix, PrefixCache
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.scheduling.wait_queue import WaitQueue
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber, Subscribers
from penstock.backend.structured_output.constraints import SequenceConstraints
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.shm.messages import Finish
from tests.simulation import device as device_module
from tests.simulation.world import run_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.forward_pass import StepBatch
    from penstock.shm.link.events import Submission

    Plant = Callable[[pytest.MonkeyPatch], None]

_MAX_SEEDS = 4000


class BrokenPlant(BaseException):
    """The planted code itself does not fit the engine any more, which finds nothing; no exception that the engine would
    take for a request's."""


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Plant:
    """Puts wrapper(original, *args) in the place of owner.name."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def planted(*args: Any, **options: Any) -> Any:
            try:
                return wrapper(original, *args, **options)
            except (TypeError, AttributeError, NameError) as error:
                raise BrokenPlant(str(error)) from error

        patch.setattr(owner, name, planted)

    return plant


def _gives_back_twice(give_back: Any, pool: PagePool, pages: list[int]) -> None:
    give_back(pool, pages)
    give_back(pool, [page for page in pages if pool.num_holders(page)])


def _names_pages_when_planned(plan_step: Any, scheduler: Scheduler) -> Plan:
    plan: Plan = plan_step(scheduler)
    for row in plan.rows():
        if row.end <= len(row.sequence.tokens):
            scheduler.note_computed(row.sequence, row.end)
    return plan


def _keeps_who_cancelled(_: Any, table: OpenRequests, sequence: Sequence, subscriber: Subscriber) -> None:
    del table._by_frontend[subscriber.frontend][subscriber.request_id]
    if not table._by_frontend[subscriber.frontend]:
        del table._by_frontend[subscriber.frontend]
    table._num_subscribed -= 1
    if len(sequence.subscribers) == 1:
        sequence.unsubscribe(subscriber)
        table.coalescer.withdraw(sequence)
        table._scheduler.remove(sequence)


def _joins_what_has_ended(patch: pytest.MonkeyPatch) -> None:
    def forget_key_only(coalescer: Coalescer, sequence: Sequence) -> None:
        coalescer._keys.pop(sequence, None)

    patch.setattr(Coalescer, "withdraw", forget_key_only)
    patch.setattr(Coalescer, "find", lambda coalescer, key: coalescer._sequences.get(key))


def _keeps_the_limit_of_who_left(unsubscribe: Any, sequence: Sequence, subscriber: Subscriber) -> None:
    limit = sequence.max_total_tokens
    unsubscribe(sequence, subscriber)
    sequence.max_total_tokens = limit


def _with_first_embeddings(batch: StepBatch) -> StepBatch:
    given = [replace(part, values=replace(part.values, first=0)) for part in batch.embeddings]  # type: ignore[type-var]
    return replace(batch, embeddings=tuple(given))


def _slot_is_lost(stop: Any, scheduler: Scheduler, sequence: Sequence) -> None:
    sequence.slot, slot = None, sequence.slot
    stop(scheduler, sequence)
    sequence.slot = slot


def _page_hashes_without_salt(
    extend: Any, keys: list[bytes], tokens: Any, num_tokens: int, page_size: int, _salt: bytes
) -> None:
    extend(keys, tokens, num_tokens, page_size, b"")


def _page_hashes_without_chain(keys: list[bytes], tokens: Any, num_tokens: int, page_size: int, salt: bytes) -> None:
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
    start: Any, scheduler: Scheduler, sequence: Sequence, prefix: Any, *args: Any, **options: Any
) -> None:
    start(scheduler, sequence, prefix, *args, **options)
    sequence.kv.num_prefilled = prefix.num_full_pages * scheduler._page_size


def _saves_go_with_rows(launch: Any, forward_pass: Any, plan: Plan, batch: Any, saves: Any, before: Any) -> Any:
    return launch(forward_pass, plan, batch, saves if plan.live_rows() else (), before)


def _saves_go_with_the_plan(launch: Any, engine: Engine, *planned: Any) -> None:
    saves = engine._scheduler.take_saves()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._scheduler, "take_saves", lambda: saves)
        launch(engine, *planned)


def _saves_come_after_their_step(
    launch: Any, forward_pass: Any, plan: Plan, batch: Any, saves: Any, before: Any
) -> Any:
    step = launch(forward_pass, plan, batch, (), before)
    if saves:
        forward_pass.save_pages(saves)
    return step


def _failed_steps_count_as_running(note_result: Any, step_timing: StepTiming, num_tokens: int, *times: float) -> None:
    if num_tokens:
        note_result(step_timing, num_tokens, *times)


def _places_are_not_kept_for_reading(find: Any, host: HostOffload) -> int | None:
    host._restored.clear()
    return find(host)  # type: ignore[no-any-return]


def _page_copies_stay_when_their_row_is_dropped(keep: Any, plan: Plan, kept: list[int]) -> Plan:
    result: Plan = keep(plan, kept)
    result.page_copies = plan.page_copies
    return result


def _sources_can_be_evicted(start: Any, scheduler: Scheduler, *args: Any, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagePool, "is_idle", lambda _pool, _page: False)
        start(scheduler, *args, **options)


def _distrusted_parts_are_kept(distrust: Any, prefixes: PrefixCache, salt: bytes) -> None:
    distrust(prefixes, salt)
    for sequences in prefixes._filling.values():
        for sequence in sequences:
            sequence.kv.is_suspect = False


def _a_failed_step_fails_them_all(_: Any, engine: Engine, plan: Plan, error: Exception) -> None:
    for row in plan.rows():
        if row.sequence.generation == row.generation:
            engine._delivery.fail(row.sequence)


def _tries_without_going_back(_: Any, scheduler: Scheduler, chunks: list[Any]) -> None:
    for sequence, _length in chunks:
        sequence.rewind(sequence.num_computed)
    scheduler._bisections.extend([chunk] for chunk in chunks)


def _abandons_without_leaving(_: Any, intake: Intake, submission: Submission) -> None:
    intake._delivery.end(submission.frontend, submission.request_id, Finish.FAILED)


def _a_newcomer_is_not_noticed(subscribe: Any, sequence: Sequence, subscriber: Subscriber) -> None:
    settled = (sequence.fast_path_until, sequence.subscribers.first_end) if sequence.subscribers else (0, 0)
    subscribe(sequence, subscriber)
    sequence.fast_path_until, sequence.subscribers.first_end = settled


def _a_restart_leaves_tokens_plain(rewind: Any, sequence: Sequence, num_computed: int) -> None:
    fast_path_until = sequence.fast_path_until
    rewind(sequence, num_computed)
    sequence.fast_path_until = fast_path_until


def _plain_tokens_complete_pages(settle: Any, sequence: Sequence) -> None:
    next_page_end, sequence.kv.next_page_end = sequence.kv.next_page_end, 1 << 30
    settle(sequence)
    sequence.kv.next_page_end = next_page_end


def _waiting_requests_never_expire(expire: Any, canceller: Canceller) -> None:
    waiting = [
        subscriber
        for sequence in canceller._open_requests._scheduler._waiting.sequences()
        for subscriber in sequence.subscribers
        if subscriber.deadline_s is not None
    ]
    deadlines = [subscriber.deadline_s for subscriber in waiting]
    for subscriber in waiting:
        subscriber.deadline_s = None
    expire(canceller)
    for subscriber, deadline_s in zip(waiting, deadlines, strict=True):
        subscriber.deadline_s = deadline_s


def _replays_one_too_few(replay: Any, delivery: Delivery, sequence: Sequence, subscriber: Subscriber) -> None:
    subscriber.next_index += 1
    replay(delivery, sequence, subscriber)


def _repeats_what_was_brought(send: Any, delivery: Delivery, sequence: Sequence, s: Subscriber, *token: Any) -> bool:
    s.next_index = min(s.next_index, token[0])
    return bool(send(delivery, sequence, s, *token))


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


def _drops_one_request_of_a_dead_frontend(_: Any, canceller: Canceller, frontend: int) -> None:
    for sequence, subscriber in canceller._open_requests.of_frontend(frontend)[:1]:
        canceller._open_requests.remove(sequence, subscriber)
        canceller._board.requests_cancelled += 1


def _goes_to_the_head_of_the_queue(put: Any, queue: WaitQueue, sequence: Sequence) -> None:
    sequence.rank = -sequence.order
    put(queue, sequence)


def _a_bad_row_spoils_the_step(apply: Any, engine: Engine, result: StepResult) -> None:
    if NOT_FINITE in result.token_ids:
        result = replace(result, token_ids=[NOT_FINITE] * len(result.token_ids))
    apply(engine, result)


def _never_unparks_in_order(unpark: Any, queue: WaitQueue, keys: Any) -> None:
    unpark(queue, list(keys)[:1])


def _tokens_of_failed_constraints_are_told(apply: Any, engine: Engine, result: StepResult) -> None:
    tokens = [0 if place in result.faults else token for place, token in enumerate(result.token_ids)]
    apply(engine, replace(result, token_ids=tokens))


def _keeps_log_probabilities_twice(deliver: Any, delivery: Delivery, sequence: Sequence, *rest: Any) -> None:
    deliver(delivery, sequence, *rest)
    if sequence.kept_logprobs:
        sequence.kept_logprobs.append(sequence.kept_logprobs[-1])


def _grammars_begin_anew(make: Any, intake: Intake, submission: Submission, *rest: Any, **options: Any) -> Any:
    prompt = submission.tokens[: 4 * submission.submit.num_prompt_tokens]
    return make(intake, replace(submission, tokens=prompt), *rest, **options)


def _forces_one_too_few(init: Any, constraints: Any, *args: Any) -> None:
    *rest, forced = args if len(args) == 5 else (*args, ())
    init(constraints, *rest, forced[:-1])


def _deadlines_do_not_hold_in_the_grammar_queue(find: Any, table: OpenRequests, frontend: int, request_id: int) -> Any:
    return None if table.grammar_queue.find(frontend, request_id) else find(table, frontend, request_id)


PLANTED: dict[str, Plant] = {
    "constraints take nothing back": _wrap(SequenceConstraints, "rewind", lambda *_: None),
    "constraints that failed let a token through": _wrap(Engine, "_apply", _tokens_of_failed_constraints_are_told),
    "masks do not wait for the step before": _wrap(
        step_module, "_make_masks", lambda masks, plan, vocab_size, _before: masks(plan, vocab_size, None)
    ),
    "what builds on a failed step is launched": _wrap(step_module, "_stop_rows", lambda *_: None),
    "log probabilities are kept twice": _wrap(Delivery, "deliver", _keeps_log_probabilities_twice),
    "different constraints share a sequence": _wrap(ShareKey, "of", lambda of, *rest: of(*rest[:3], None, ())),
    "different stop ids share a sequence that keeps them out": _wrap(
        ShareKey, "of", lambda of, *rest: of(*rest[:4], ())
    ),
    "different numbers of log probabilities share a sequence": _wrap(
        ShareKey,
        "of",
        lambda of, salt, prompt, sampling, *rest: of(salt, prompt, replace(sampling, num_logprobs=-1), *rest),
    ),
    "a resumed stream's grammar begins anew": _wrap(Intake, "_make_constraints", _grammars_begin_anew),
    "the last token of a scored prompt is not forced": _wrap(SequenceConstraints, "__init__", _forces_one_too_few),
    "who left while a grammar was compiled is taken on": _wrap(GrammarQueue, "remove", lambda *_: True),
    "deadlines do not hold in the grammar queue": _wrap(
        OpenRequests, "_deadline_of", _deadlines_do_not_hold_in_the_grammar_queue
    ),
    "pages are given back twice": _wrap(PagePool, "release", _gives_back_twice),
    "who waits for a prefix is forgotten": _wrap(WaitQueue, "unpark", lambda *_: None),
    "only the first of several keys lets go of who waits": _wrap(WaitQueue, "unpark", _never_unparks_in_order),
    "a page is named before its step is applied": _wrap(Scheduler, "plan", _names_pages_when_planned),
    "a cancelled subscriber goes on listening": _wrap(OpenRequests, "remove", _keeps_who_cancelled),
    "a sequence that has ended takes on listeners": _joins_what_has_ended,
    "tenants share sequences": _wrap(ShareKey, "of", lambda of, _salt, *rest: of(b"", *rest)),
    "tenants share pages": _wrap(prefixes_module, "extend_page_hashes", _page_hashes_without_salt),
    "different seeds share a sequence": _wrap(
        ShareKey, "of", lambda of, salt, prompt, sampling, *rest: of(salt, prompt, replace(sampling, seed=0), *rest)
    ),
    "different penalties share a sequence": _wrap(
        ShareKey,
        "of",
        lambda of, salt, prompt, sampling, *rest: of(salt, prompt, replace(sampling, presence_penalty=0.0), *rest),
    ),
    "a stopped sequence keeps its slot": _wrap(Scheduler, "_stop_running", _slot_is_lost),
    "page keys ignore what came before": lambda patch: patch.setattr(
        prefixes_module, "extend_page_hashes", _page_hashes_without_chain
    ),
    "a sequence that goes on after a stop is not rewound": _wrap(Sequence, "rewind", _rewinds_only_restarts),
    "the slot is not told of a restart": _wrap(Sequence, "rewind", _slot_is_not_told_of_a_restart),
    "steps in flight count after a restart": _wrap(Sequence, "rewind", _steps_in_flight_still_count),
    "priorities are turned round": _wrap(
        Intake,
        "submit",
        lambda submit, intake, event: submit(
            intake, replace(event, submit=msgspec.structs.replace(event.submit, priority=-event.submit.priority))
        ),
    ),
    "who joins a stream is not looked at": _wrap(Sequence, "subscribe", _a_newcomer_is_not_noticed),
    "tokens are plain beyond the first limit": _wrap(
        Subscribers,
        "remove",
        lambda remove, subscribers, one: (remove(subscribers, one), setattr(subscribers, "first_end", 99)),
    ),
    "tokens are plain across a restart": _wrap(Sequence, "rewind", _a_restart_leaves_tokens_plain),
    "tokens that complete a page are plain": _wrap(Sequence, "settle", _plain_tokens_complete_pages),
    "a token too many is taken from a copied page": _wrap(PrefixCache, "find", _copies_a_token_too_many),
    "what two pages have in common is overestimated": _wrap(
        prefixes_module,
        "count_common_tokens",
        lambda count, *texts: min(count(*texts) + 1, *(len(text) // 4 for text in texts)),
    ),
    "tokens are copied before their step is applied": _wrap(PrefixCache, "find", _copies_what_is_planned),
    "tenants copy from each other's pages": _wrap(
        prefixes_module, "_parent_hash", lambda key, sequence, num_pages: key(sequence, num_pages) if num_pages else b""
    ),
    "pages are not copied": _wrap(BatchBuilder, "build", lambda build, *args: replace(build(*args), page_copies=())),
    "embeddings stay behind when a row before theirs is dropped": _wrap(
        step_module,
        "keep_rows",
        lambda keep, batch, *args: replace(keep(batch, *args), embeddings=batch.embeddings),
    ),
    "a chunk's embeddings are the prompt's first": _wrap(
        BatchBuilder, "build", lambda build, *args: _with_first_embeddings(build(*args))
    ),
    "what embeddings gave is found by their token ids": lambda patch: patch.setattr(
        intake_module.secrets, "token_bytes", bytes
    ),
    "pages are not restored": _wrap(
        BatchBuilder, "build", lambda build, *args: replace(build(*args), page_restores=())
    ),
    "a page restore outlives its row": _wrap(Plan, "keep", _page_restores_stay_when_their_row_is_dropped),
    "restored pages count as computed before they are there": _wrap(Scheduler, "_start", _restored_counts_as_computed),
    "what is saved is lost with a step whose rows have left": _wrap(device_module, "launch_step", _saves_go_with_rows),
    "what is saved is lost with a plan that cannot be built": _wrap(Engine, "_launch", _saves_go_with_the_plan),
    "what is saved is copied after the step that takes its page": _wrap(
        device_module, "launch_step", _saves_come_after_their_step
    ),
    "a step that failed is waited for with the next plan": _wrap(
        StepTiming, "note_result", _failed_steps_count_as_running
    ),
    "a place is written before the step has read it": _wrap(
        HostOffload, "_free_host_page", _places_are_not_kept_for_reading
    ),
    "pages with bad logits stay on the host": _wrap(HostOffload, "invalidate_tenant", lambda *_: None),
    "a page copy outlives its row": _wrap(Plan, "keep", _page_copies_stay_when_their_row_is_dropped),
    "a page is evicted while it is to be copied": _wrap(Scheduler, "_start", _sources_can_be_evicted),
    "part of a page with bad logits is left behind": _wrap(
        PrefixCache, "invalidate_tenant", _distrusted_parts_are_kept
    ),
    "who waits for a prefix waits for ever": _wrap(WaitQueue, "unpark_overdue", lambda *_: None),
    "a failed step fails all its requests": _wrap(Engine, "_apply_failure", _a_failed_step_fails_them_all),
    "a failed step counts as computed": _wrap(Scheduler, "bisect", _tries_without_going_back),
    "a request that could not be taken on is kept": _wrap(Intake, "_abandon", _abandons_without_leaving),
    "waiting requests never expire": _wrap(Canceller, "expire", _waiting_requests_never_expire),
    "a replay leaves out the first token": _wrap(Delivery, "replay", _replays_one_too_few),
    "a resumed stream begins again": _wrap(Delivery, "_send", _repeats_what_was_brought),
    "tokens are computed for who has left": _wrap(Sequence, "unsubscribe", _keeps_the_limit_of_who_left),
    "a page found again can still be evicted": _wrap(PagePool, "hold", _evicts_what_is_held),
    "a prefix hit leaves nothing to compute": _wrap(PrefixCache, "find", _finds_the_whole_prompt),
    "the page table keeps a former owner's pages": _wrap(
        BatchBuilder, "_clear", _page_table_keeps_a_former_owners_pages
    ),
    "a dead frontend's requests live on": _wrap(Canceller, "drop_frontend", _drops_one_request_of_a_dead_frontend),
    "the last one to come goes first": _wrap(WaitQueue, "put", _goes_to_the_head_of_the_queue),
    "membership is bound when planned": lambda patch: patch.setattr(
        Plan, "live_rows", lambda plan: list(range(len(plan)))
    ),
    "bad logits fail the whole step": _wrap(Engine, "_apply", _a_bad_row_spoils_the_step),
    "bad logits leave their pages behind": lambda patch: patch.setattr(
        PrefixCache, "invalidate_tenant", lambda _prefix_cache, _salt: None
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
