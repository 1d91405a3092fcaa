"""A replay sends the recorded requests through the real loop: they end as they did, and share what they shared."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.backend.options import BackendOptions
from penstock.commands.recorder.history import Life, read_history
from penstock.shm.memory.ring import RingReader, Stretch
from penstock.shm.messages import Finish
from penstock.shm.recording.events import Arrived, Ended, Left, Preempted, Started, pack_event
from penstock.shm.recording.file import Recording, RecordingError, RecordingWriter, read_recording
from penstock.shm.recording.records import Kind, unpack
from penstock.tools.replay.command import replay, run_replay
from penstock.tools.replay.comparison import Account, compare_tokens
from tests.backend.harness import expected_tokens
from tests.backend.recorded import Recorded

STEP_S = 0.01
STOP_IDS = (7, 8, 9, 10, 11)
PROMPT = [21, 22, 23, 24, 25, 26, 27, 28, 29]


def turn(recorded: Recorded, turns: int = 1) -> None:
    for _ in range(turns):
        recorded.bench.turn()
        recorded.bench.now_s += STEP_S


def record_requests(*, with_tokens: bool = False) -> Recorded:
    """Requests that share beginnings, are coalesced, stop, reach their limit, are cancelled and continue a dialogue."""
    recorded = Recorded(with_tokens=with_tokens)
    bench = recorded.bench
    recorded.recorder._clock = bench.clock
    bench.now_s, bench.executor.step_s = 500.0, STEP_S
    for number in range(16):
        prompt = [*PROMPT, 30 + number // 4, *range(40, 40 + 2 * (number // 4))]
        options: dict[str, Any] = {"may_share": number % 4 < 2, "frontend": 1 + number % 2}
        bench.submit(prompt, 12 + number % 3, request_id=number, stop_ids=STOP_IDS, **options)
        turn(recorded, 2)
    bench.cancel(15, 2)
    while not bench.is_idle:
        turn(recorded)
    bench.submit(PROMPT[::-1], 12, request_id=98)
    while not bench.is_idle:
        turn(recorded)
    answer = bench.received(98, 1).token_ids
    bench.submit([*PROMPT[::-1], *answer, 50, 51, 52], 5, request_id=99)
    while not bench.is_idle:
        turn(recorded)
    return recorded


@pytest.fixture(scope="module")
def life() -> Iterator[Life]:
    recorded = record_requests()
    assert recorded.bench.board.requests_coalesced
    yield recorded.life()
    recorded.close()


def life_of(stretch: Stretch) -> Life:
    (life,) = read_history(Recording([unpack(record) for record in stretch.records]))
    return life


def replayed(life: Life) -> Life:
    return life_of(run_replay(life, BackendOptions(), with_tokens=False)[0])


def ends(life: Life) -> dict[tuple[int, int], int]:
    return {(event.frontend, event.request_id): event.finish for _, event in life.events if isinstance(event, Ended)}


def tokens_at_end(life: Life) -> dict[tuple[int, int], int]:
    """Request → tokens of its sequence when it left, of those that finished."""
    finished = ends(life)
    lefts = [event for _, event in life.events if isinstance(event, Left)]
    return {
        (event.frontend, event.request_id): event.num_tokens
        for event in lefts
        if (event.frontend, event.request_id) in finished
    }


def test_replayed_requests_end_as_the_recorded_ones_did(life: Life) -> None:
    again = replayed(life)
    assert {Finish.STOP, Finish.LENGTH} <= set(ends(life).values())
    assert ends(again) == ends(life)
    assert tokens_at_end(again) == tokens_at_end(life)
    arrivals = [[(time_s, event) for time_s, event in of.events if isinstance(event, Arrived)] for of in (life, again)]
    assert [event.request_id for _, event in arrivals[1]] == [event.request_id for _, event in arrivals[0]]
    late_s = [now_s - then_s for (then_s, _), (now_s, _) in zip(*arrivals, strict=True)]
    assert min(late_s) >= 0
    assert max(late_s) < STEP_S


def test_made_up_prompts_share_pages_where_the_recorded_ones_did(life: Life) -> None:
    again = replayed(life)
    account, replayed_account = Account.of(life), Account.of(again)
    assert replayed_account.num_joined == account.num_joined > 0
    cached = [
        {event.requests[0]: event.num_cached for _, event in of.events if isinstance(event, Started)}
        for of in (life, again)
    ]
    assert cached[0][1, 99] > len(PROMPT) + 4  # tokens of the answer before were found, too
    assert cached[1][1, 99] == cached[0][1, 99]
    assert sum(cached[0].values()) * 0.9 <= sum(cached[1].values()) <= sum(cached[0].values()) * 1.1


def test_replay_gives_the_same_plans_each_time_it_runs(life: Life) -> None:
    first, second = (Account.of(replayed(life)) for _ in range(2))
    assert first.shapes == second.shapes
    assert first.total_s == second.total_s


def test_too_few_pages_preempt_in_the_replay_as_they_did_in_the_recording() -> None:
    recorded = Recorded(num_pages=9, max_running=4, max_batch_tokens=8, max_context=36)
    recorded.recorder._clock = recorded.bench.clock
    recorded.bench.executor.step_s = STEP_S
    for request_id in range(6):
        recorded.bench.submit([request_id, 3, 5, 7, 11, 13], 20, request_id=request_id)
    while not recorded.bench.is_idle:
        turn(recorded)
    life = recorded.life()
    assert life.started is not None
    started = msgspec.structs.replace(life.started, max_running=4, max_batch_tokens=8, num_pages=9, max_context=36)
    again = replayed(replace(life, started=started))
    for of in (life, again):
        assert any(isinstance(event, Preempted) for _, event in of.events)
    assert ends(again) == ends(life) == {(1, request_id): Finish.LENGTH for request_id in range(6)}
    recorded.close()


def write(recorded: Recorded, path: Path, *, with_tokens: bool = False) -> Path:
    reader = RingReader(recorded.fd)
    with RecordingWriter(path, with_tokens=with_tokens) as file:
        file.write(reader.read())
    reader.close()
    return path


def test_recorded_prompts_give_the_same_tokens_through_the_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = record_requests(with_tokens=True)
    path = write(recorded, tmp_path / "out.rec", with_tokens=True)
    (tmp_path / "config.json").write_text('{"vocab_size": 97}')
    options = BackendOptions(model=str(tmp_path), forward_pass="fake", gpu="none")
    with pytest.raises(SystemExit) as left:
        replay(path, with_tokens=True, out=tmp_path / "again.rec", options=options)
    assert left.value.code == 0
    assert "17 of 17 requests have the same tokens" in capsys.readouterr().out
    (life,), (again,) = (read_history(read_recording(tmp_path / name)) for name in ("out.rec", "again.rec"))
    prompt = array("i", life.prompts[1, 99].tokens).tolist()
    assert Account.of(again).tokens[1, 99] == expected_tokens(prompt, 5, 97)
    recorded_account = Account.of(life)
    recorded_account.tokens[1, 99] = [1]
    assert compare_tokens(recorded_account, Account.of(again)).different == [(1, 99)]
    (tmp_path / "config.json").write_text('{"vocab_size": 96}')
    with pytest.raises(SystemExit):
        replay(path, with_tokens=True, options=options)
    assert "vocabulary has 97 tokens; this model's has 96" in capsys.readouterr().err
    recorded.close()


def test_what_cannot_be_replayed_is_said_in_one_line(
    life: Life, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = record_requests()
    path = write(recorded, tmp_path / "out.rec")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[-20:])
    replay(path)
    said = capsys.readouterr()
    assert said.err == f"{path}: it is cut off at byte {len(whole)}; what comes before that is read\n"
    assert "requests that finished" in said.out
    for content, with_tokens, message in (
        (whole, True, "it has no tokens; record with --with-tokens, from a server that runs with --record-tokens\n"),
        (whole[:8] + bytes([9]) + whole[9:], False, "this version of Penstock reads format 2\n"),
        (whole[:4], False, "is not a recording of Penstock\n"),
        (whole[:16], False, "has no records\n"),
    ):
        path.write_bytes(content)
        with pytest.raises(SystemExit):
            replay(path, with_tokens=with_tokens)
        said = capsys.readouterr()
        assert said.err.endswith(message)
        assert said.err.count("\n") == 1
    recorded.close()


def test_prompts_of_another_protocol_are_refused_by_name(tmp_path: Path) -> None:
    recorded = record_requests(with_tokens=True)
    recording = recorded.records()
    started = msgspec.structs.replace(recorded.life().started, protocol_version=3)  # type: ignore[type-var]
    recording.records[0] = unpack(pack_event(started, 500.0))  # type: ignore[arg-type]
    (life,) = read_history(recording)
    assert not life.prompts
    with pytest.raises(RecordingError, match="its prompts are messages of protocol 3; this version of Penstock reads"):
        run_replay(life, BackendOptions(), with_tokens=True)
    assert replayed(life).steps
    recorded.close()


def test_tokens_of_a_late_joiner_end_at_its_own_limit_and_stop() -> None:
    recorded = Recorded(with_tokens=True)
    tokens = expected_tokens(PROMPT, 20, 97)
    recorded.bench.submit(PROMPT, 20, request_id=1, may_share=True)
    turn(recorded, 12)
    recorded.bench.submit(PROMPT, 4, request_id=2, may_share=True)
    recorded.bench.submit(PROMPT, 20, request_id=3, may_share=True, stop_ids=(tokens[2],))
    while not recorded.bench.is_idle:
        turn(recorded)
    account = Account.of(recorded.life())
    assert account.num_joined == 2
    assert account.tokens[1, 1] == tokens
    assert account.tokens[1, 2] == tokens[:4]
    assert account.tokens[1, 3] == tokens[: tokens.index(tokens[2]) + 1]
    recorded.close()


def test_requests_with_missing_token_records_are_counted_and_not_compared() -> None:
    recorded = record_requests(with_tokens=True)
    recording = recorded.records()
    indices = [index for index, record in enumerate(recording.records) if record.kind == Kind.TOKENS]
    del recording.records[indices[len(indices) // 2]]
    (life,) = read_history(recording)
    whole, account = Account.of(recorded.life()), Account.of(life)
    assert 0 < account.num_incomplete == len(whole.tokens) - len(account.tokens)
    assert compare_tokens(account, whole).different == []
    recorded.close()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_running", 1 << 40, "max_running 1099511627776; it is from 1 to 4096"),
        ("num_pages", -1, "num_pages -1; it is from 0 to"),
        ("page_size", 0, "page_size 0; it is from 1 to 4096"),
        ("max_context", 1 << 20, "64 pages of 4 tokens, which cannot hold its context of 1048576 tokens"),
        ("vocab_size", 2, "vocab_size 2; it is from 64 to"),
        ("kv_windows", (None, 0), r"windows \(None, 0\); they are from 1 to 64, of 1 token or more"),
        ("kv_windows", (), r"windows \(\); they are from 1 to 64"),
        ("kv_windows", (None, 8), "64 pages of 4 tokens, which cannot hold its context of 256 tokens"),
    ],
)
def test_sizes_out_of_bounds_are_refused(life: Life, field: str, value: int, message: str) -> None:
    assert life.started is not None
    hostile = replace(life, started=msgspec.structs.replace(life.started, **{field: value}))
    with pytest.raises(RecordingError, match=message):
        replayed(hostile)


hostile_integers = st.sampled_from((-1, 0, 1, 3, 1 << 20, 1 << 31, 1 << 62))
hostile_times = st.sampled_from((0.0, -1.0, 501.0, 1e300, float("nan"), float("inf")))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_hostile_events_are_refused_or_replayed(life: Life, data: st.DataObject) -> None:
    events = list(life.events)
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(events) - 1))
        time_s, event = events[index]
        fields = [
            name for name in event.__struct_fields__ if isinstance(getattr(event, name), int | float | str | bytes)
        ]
        field = data.draw(st.sampled_from(["time", *fields]))
        if field == "time":
            events[index] = data.draw(hostile_times), event
            continue
        old = getattr(event, field)
        value = data.draw(hostile_integers) if isinstance(old, int | float) else old + type(old)(old[:1] * 3)
        events[index] = time_s, msgspec.structs.replace(event, **{field: value})
    with suppress(RecordingError):
        assert replayed(replace(life, events=events)).steps
