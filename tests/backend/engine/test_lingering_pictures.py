"""A lingering request with pictures outlives the frontend that holds their pixels."""

from __future__ import annotations

import pytest

from penstock.shm.link.events import Cancellation, FrontendDeath
from penstock.shm.messages import FailureCode, Finish, Keep, Linger, StreamName
from tests.backend.engine.test_pictures import PictureBench, picture

LINGER = Linger(StreamName(b"", "s"), 30)


@pytest.mark.parametrize("gone", [Cancellation(1, 0, keep=Keep.ALL), FrontendDeath(1)])
def test_a_request_goes_on_when_its_pixels_are_gone(gone: Cancellation | FrontendDeath) -> None:
    bench = PictureBench()
    parts: list[int | bytes] = [1, picture(12), 2, picture(3)]
    due = bench.ask(parts, linger=LINGER)
    bench.turn()
    assert bench.board.lingering_bytes > 64 * 15
    bench.link.arrivals.append(gone)
    bench.pixels.stored.clear()
    bench.run()
    assert bench.board.lingering_bytes < 64 * 15
    bench.ask(parts, request_id=1, linger=LINGER, frontend=2)
    bench.turn()
    assert bench.received(1, frontend=2).token_ids == due
    assert bench.received(1, frontend=2).finishes == [Finish.LENGTH]
    bench.close()


def test_pixels_that_are_kept_count_as_bytes_of_streams() -> None:
    bench = PictureBench()
    bench.requests.streams._max_bytes = 64 * 12
    bench.ask([1, picture(12), 2], linger=LINGER)
    bench.ask([1, picture(5), 2], request_id=1, linger=Linger(StreamName(b"", "t"), 30))
    bench.turn()
    assert (failure := bench.received(1).failure) is not None
    assert failure.code == FailureCode.OVERLOADED
    bench.run()
    assert bench.received(0).finishes == [Finish.LENGTH]
    bench.close()


def test_pixels_are_dropped_when_the_last_choice_that_runs_is_cancelled() -> None:
    bench = PictureBench()
    for choice, num_tokens in ((0, 2), (1, 40)):
        linger = Linger(LINGER.stream, 30, choice=choice)
        bench.ask([1, picture(12), 2 + choice], max_tokens=num_tokens, request_id=choice, linger=linger)
    while not bench.received(0).finishes:
        bench.turn()
        bench.tower.finish()
    assert bench.board.lingering_bytes > 64 * 12
    bench.link.arrivals.append(Cancellation(1, 1))
    bench.turn()
    assert bench.board.lingering_bytes < 64 * 12 + 1024
    bench.requests.streams.check_integrity()
    bench.close()
