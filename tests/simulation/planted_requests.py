"""Bugs to plant in how requests are taken in, coalesced, delivered and cancelled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock.backend.engine.coalescer import Coalescer, ShareKey, _Offer
from penstock.backend.engine.requests.cancellation import Canceller
from penstock.backend.engine.requests.delivery import Delivery
from penstock.backend.engine.requests.intake import Intake
from penstock.backend.engine.requests.request_table import RequestTable
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber, Subscribers
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.shm.messages import Failure, FailureCode, Finish
from tests.simulation.planting import Plant, wrap

if TYPE_CHECKING:
    from penstock.shm.link.events import Submission


def _keeps_who_cancelled(_: Any, table: RequestTable, sequence: Sequence, subscriber: Subscriber) -> None:
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
    patch.setattr(_Offer, "is_alive", True)


def _keeps_the_limit_of_who_left(unsubscribe: Any, sequence: Sequence, subscriber: Subscriber) -> None:
    limit = sequence.max_total_tokens
    unsubscribe(sequence, subscriber)
    sequence.max_total_tokens = limit


def _rewinds_only_restarts(rewind: Any, sequence: Sequence, num_computed: int) -> None:
    if num_computed == 0:
        rewind(sequence, num_computed)


def _slot_is_not_told_of_a_restart(rewind: Any, sequence: Sequence, num_computed: int) -> None:
    rewind(sequence, num_computed)
    sequence.needs_slot_init = False


def _steps_in_flight_still_count(rewind: Any, sequence: Sequence, num_computed: int) -> None:
    rewind(sequence, num_computed)
    sequence.generation -= 1


def _abandons_without_leaving(_: Any, intake: Intake, frontend: int, request_id: int) -> None:
    intake._delivery.end(frontend, request_id, Finish.FAILED)


def _a_newcomer_is_not_noticed(subscribe: Any, sequence: Sequence, subscriber: Subscriber) -> None:
    settled = (sequence.fast_path_until, sequence.subscribers.first_end) if sequence.subscribers else (0, 0)
    subscribe(sequence, subscriber)
    sequence.fast_path_until, sequence.subscribers.first_end = settled


def _a_restart_leaves_tokens_plain(rewind: Any, sequence: Sequence, num_computed: int) -> None:
    fast_path_until = sequence.fast_path_until
    rewind(sequence, num_computed)
    sequence.fast_path_until = fast_path_until


def _plain_tokens_complete_pages(update: Any, sequence: Sequence) -> None:
    next_page_end, sequence.kv.next_page_end = sequence.kv.next_page_end, 1 << 30
    update(sequence)
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


def _drops_one_request_of_a_dead_frontend(_: Any, canceller: Canceller, frontend: int) -> None:
    for sequence, subscriber in canceller._open_requests.of_frontend(frontend)[:1]:
        canceller._open_requests.remove(sequence, subscriber)
        canceller._board.requests_cancelled += 1


def _keeps_log_probabilities_twice(deliver: Any, delivery: Delivery, sequence: Sequence, *rest: Any) -> None:
    deliver(delivery, sequence, *rest)
    if sequence.past_logprobs:
        sequence.past_logprobs.append(sequence.past_logprobs[-1])


def _grammars_begin_anew(make: Any, intake: Intake, submission: Submission, *rest: Any, **options: Any) -> Any:
    prompt = submission.tokens[: 4 * submission.message.num_prompt_tokens]
    return make(intake, replace(submission, tokens=prompt), *rest, **options)


def _refuses_what_was_admitted(patch: pytest.MonkeyPatch) -> None:
    find_refusal = Intake.find_refusal

    def refuses(intake: Intake, submission: Submission) -> Failure | None:
        if submission.message.admitted_ns and intake._is_full_for(submission.message):
            return Failure(submission.request_id, FailureCode.OVERLOADED)
        return find_refusal(intake, submission)

    patch.setattr(Intake, "find_refusal", refuses)


def _deadlines_do_not_hold_in_the_grammar_queue(find: Any, table: RequestTable, frontend: int, request_id: int) -> Any:
    return None if table.grammar_queue.find(frontend, request_id) else find(table, frontend, request_id)


REQUEST_BUGS: dict[str, Plant] = {
    "log probabilities are kept twice": wrap(Delivery, "deliver", _keeps_log_probabilities_twice),
    "different constraints share a sequence": wrap(ShareKey, "of", lambda of, *rest: of(*rest[:3], None, ())),
    "different stop ids share a sequence that forbids them": wrap(ShareKey, "of", lambda of, *rest: of(*rest[:4], ())),
    "different numbers of log probabilities share a sequence": wrap(
        ShareKey,
        "of",
        lambda of, salt, prompt, sampling, *rest: of(salt, prompt, replace(sampling, num_logprobs=-1), *rest),
    ),
    "the grammar of a resumed stream starts over": wrap(Intake, "_make_constraints", _grammars_begin_anew),
    "a request cancelled while its grammar compiled gets a sequence": wrap(GrammarQueue, "remove", lambda *_: True),
    "deadlines are ignored in the grammar queue": wrap(
        RequestTable, "_deadline_of", _deadlines_do_not_hold_in_the_grammar_queue
    ),
    "resumed requests that are behind start a sequence of their own": wrap(Coalescer, "find_longer", lambda *_: None),
    "resumed requests wait in the order in which they arrive": lambda patch: patch.setattr(
        Sequence, "turn", property(lambda sequence: (sequence.rank, 0, sequence.round, sequence.order))
    ),
    "newcomers go before what had run": lambda patch: patch.setattr(Sequence, "has_run_before", False),
    "one tenant fills the queue for all": lambda patch: patch.setattr(
        "penstock.backend.engine.requests.intake.has_place", lambda num_waiting, limit, *_: num_waiting < limit
    ),
    "a full queue refuses resumed requests": _refuses_what_was_admitted,
    "a cancelled subscriber stays subscribed": wrap(RequestTable, "remove", _keeps_who_cancelled),
    "a sequence that has ended can be joined": _joins_what_has_ended,
    "tenants share sequences": wrap(ShareKey, "of", lambda of, _salt, *rest: of(b"", *rest)),
    "different seeds share a sequence": wrap(
        ShareKey, "of", lambda of, salt, prompt, sampling, *rest: of(salt, prompt, replace(sampling, seed=0), *rest)
    ),
    "different penalties share a sequence": wrap(
        ShareKey,
        "of",
        lambda of, salt, prompt, sampling, *rest: of(salt, prompt, replace(sampling, presence_penalty=0.0), *rest),
    ),
    "a sequence that goes on after a stop is not rewound": wrap(Sequence, "rewind", _rewinds_only_restarts),
    "the slot is not initialized after a restart": wrap(Sequence, "rewind", _slot_is_not_told_of_a_restart),
    "steps in flight count after a restart": wrap(Sequence, "rewind", _steps_in_flight_still_count),
    "priorities are reversed": wrap(
        Intake,
        "submit",
        lambda submit, intake, event: submit(
            intake, replace(event, message=msgspec.structs.replace(event.message, priority=-event.message.priority))
        ),
    ),
    "a new subscriber does not end the fast path": wrap(Sequence, "subscribe", _a_newcomer_is_not_noticed),
    "tokens take the fast path beyond the first limit": wrap(
        Subscribers,
        "remove",
        lambda remove, subscribers, one: (remove(subscribers, one), setattr(subscribers, "first_end", 99)),
    ),
    "tokens take the fast path across a restart": wrap(Sequence, "rewind", _a_restart_leaves_tokens_plain),
    "tokens that complete a page take the fast path": wrap(Sequence, "update_fast_path", _plain_tokens_complete_pages),
    "a request that failed at intake stays open": wrap(Intake, "_abandon", _abandons_without_leaving),
    "waiting requests never expire": wrap(Canceller, "expire", _waiting_requests_never_expire),
    "a replay leaves out the first token": wrap(Delivery, "replay", _replays_one_too_few),
    "a resumed stream repeats its tokens": wrap(Delivery, "_send", _repeats_what_was_brought),
    "tokens are computed for a subscriber that has left": wrap(Sequence, "unsubscribe", _keeps_the_limit_of_who_left),
    "requests of a dead frontend stay open": wrap(Canceller, "drop_frontend", _drops_one_request_of_a_dead_frontend),
}
