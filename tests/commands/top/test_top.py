"""`penstock top` shows what the engine has open, and follows the keyboard of a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import termios
import time
from collections.abc import Iterator

import httpx2
import pytest
from rich.console import Console

from penstock.commands.top import command
from penstock.commands.top.command import Keys, Operator
from penstock.commands.top.frame import draw, num_lines_that_fit
from penstock.commands.top.snapshot import Meter, Snapshot, Sort, sorted_lines
from penstock.main import app
from penstock.shm.memory.ring import RingReader
from penstock.shm.recording.live import LiveEngine
from penstock.shm.recording.rings import NoRing, open_ring
from tests.backend.recorded import Recorded

PROMPT = [21, 22, 23, 24, 25, 26, 27, 28, 29]
STEP_S = 0.01


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    """Requests that run, wait, are coalesced and were cancelled; the clock is this machine's."""
    recorded = Recorded(max_running=2, max_batch_tokens=8)
    bench = recorded.bench
    recorded.recorder._clock = bench.clock
    bench.now_s, bench.executor.step_s = time.monotonic() - 1.0, STEP_S
    bench.submit(PROMPT, 30, request_id=1, may_share=True)
    bench.submit(PROMPT, 30, request_id=2, may_share=True)
    bench.submit([9, 8, 7], 40, request_id=3, frontend=2)
    bench.submit([5, 5, 5, 5], 50, request_id=4)
    bench.submit([6, 6, 6], 50, request_id=5)
    for _ in range(8):
        bench.turn()
        bench.now_s += STEP_S
    bench.cancel(5, 1)
    bench.turn()
    yield recorded
    recorded.close()


def snapshot_of(recorded: Recorded) -> Snapshot:
    ring = RingReader(recorded.fd)
    snapshot = Meter(LiveEngine(ring)).take(recorded.bench.now_s)
    ring.close()
    return snapshot


def text_of(snapshot: Snapshot, sort: Sort = Sort.AGE, num_lines: int = 100, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(draw(snapshot, sort, num_lines=num_lines))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_are_the_engines_open_requests_with_their_progress(recorded: Recorded) -> None:
    snapshot = snapshot_of(recorded)
    lines = {line.name: line for line in snapshot.lines}
    assert lines.keys() == {"1.1", "1.2", "2.3", "1.4"}
    assert [name for name, line in lines.items() if not line.is_running] == ["1.4"]
    assert (snapshot.num_running, snapshot.num_waiting) == (2, 1)
    assert (lines["1.2"].state, lines["1.2"].num_generated) == ("coalesced", lines["1.1"].num_generated)
    num_known = max(row.end for rows in recorded.plans for row in rows)
    assert lines["1.1"].num_generated == num_known + 1 - len(PROMPT) > 0
    assert lines["2.3"].max_tokens == 40
    assert lines["1.4"].num_generated == 0
    (tenant,) = snapshot.tenants
    assert (tenant.num_running, tenant.num_waiting) == (3, 1)
    assert snapshot.rates.num_cancelled == 1
    assert snapshot.rates.step_p50_ms == pytest.approx(1e3 * STEP_S)
    assert 0 < snapshot.rates.busy <= 1


def test_rates_fall_to_zero_when_nothing_has_happened_for_their_window(recorded: Recorded) -> None:
    ring = RingReader(recorded.fd)
    meter = Meter(LiveEngine(ring))
    assert meter.take(recorded.bench.now_s).rates.steps_per_s > 0
    later = meter.take(recorded.bench.now_s + 100.0)
    ring.close()
    assert (later.rates.steps_per_s, later.rates.busy, later.rates.num_cancelled) == (0, 0, 0)
    assert "100 s ago" in text_of(later)


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        (Sort.PROMPT, ["1.1", "1.2", "1.4", "2.3"]),
        (Sort.STATE, ["1.4", "1.1", "1.2", "2.3"]),
        (Sort.AGE, ["1.1", "1.2", "2.3", "1.4"]),
    ],
)
def test_lines_are_sorted_by_the_chosen_column(recorded: Recorded, sort: Sort, names: list[str]) -> None:
    snapshot = snapshot_of(recorded)
    assert [line.name for line in sorted_lines(snapshot.lines, sort)] == names
    shown = [line.split()[0] for line in text_of(snapshot, sort).splitlines() if line[:2] in ("1.", "2.")]
    assert shown == names


def test_frame_has_room_for_as_many_lines_as_the_terminal(recorded: Recorded) -> None:
    snapshot = snapshot_of(recorded)
    text = text_of(snapshot, num_lines=1)
    assert "and 3 more, sorted by age" in text
    for height in (24, 30, 60):
        frame = text_of(snapshot, num_lines=num_lines_that_fit(height, snapshot))
        assert len(frame.splitlines()) + 1 <= height
    assert num_lines_that_fit(3, snapshot) == 1
    narrow, wide = text_of(snapshot, width=80).splitlines(), text_of(snapshot).splitlines()
    assert [line.rstrip() for line in narrow] == [line.rstrip() for line in wide]  # nothing is wrapped or cut


def test_engine_that_has_not_started_is_shown() -> None:
    recorded = Recorded()
    text = text_of(snapshot_of(recorded))
    recorded.close()
    assert "no step has run yet" in text
    assert "no open requests" in text


def test_once_prints_one_frame_as_plain_text(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(command, "open_ring", lambda _pid, **_: (RingReader(recorded.fd), None))
    with pytest.raises(SystemExit) as ended:
        app(["top", "--once", "--sort", "prompt"])
    assert ended.value.code in (None, 0)
    shown = capsys.readouterr().out
    assert "running 2/8   waiting 1" in shown
    assert "\x1b" not in shown
    assert [line.split()[0] for line in shown.splitlines() if line[:2] in ("1.", "2.")][:2] == ["1.1", "1.2"]
    with pytest.raises(SystemExit):
        app(["top", "--json", "--sort", "prompt"])
    found = json.loads(capsys.readouterr().out)
    assert (found["running"], found["waiting"], found["backend"]["max_running"]) == (2, 1, 8)
    assert [request["name"] for request in found["requests"]][:2] == ["1.1", "1.2"]


def test_backend_that_started_last_is_shown(recorded: Recorded) -> None:
    later = Recorded(pid=2, wall_s=9.0)
    with pytest.raises(NoRing, match="choose one"):
        open_ring(os.getpid())
    ring, started = open_ring(os.getpid(), newest=True)
    assert started.pid == 2
    ring.close()
    later.close()


def test_terminal_that_cannot_be_redrawn_is_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["top"])
    assert ended.value.code == 1
    assert "give --once" in capsys.readouterr().err


def test_missing_server_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail_to_open(_pid: int | None, *, newest: bool) -> None:
        raise NoRing("no running server of this user has a flight recorder")

    monkeypatch.setattr(command, "open_ring", fail_to_open)
    with pytest.raises(SystemExit) as ended:
        app(["top", "--once"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.strip() == "penstock top: no running server of this user has a flight recorder"


class Typist(io.StringIO):
    """A screen whose reader types the next key as soon as it shows what the key before has changed."""

    def __init__(self, keyboard: int, todo: list[tuple[str, bytes]]) -> None:
        super().__init__()
        self._keyboard = keyboard
        self.todo = todo

    def write(self, text: str) -> int:
        if self.todo and self.todo[0][0] in text:
            os.write(self._keyboard, self.todo.pop(0)[1])
        return super().write(text)


@pytest.mark.parametrize("last", [b"q", b"\x04q"])
def test_keys_sort_pause_and_quit_and_the_terminal_is_restored(recorded: Recorded, last: bytes) -> None:
    keyboard, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    todo = [("sorted by age", b"s"), ("sorted by state", b"?r "), ("by rate   PAUSED", b"c")]
    todo.append(("give --admin-key", last))
    screen = Typist(keyboard, todo)
    console = Console(file=screen, width=140, height=40, force_terminal=True, _environ={"TERM": "xterm"})
    ring = RingReader(recorded.fd)
    command.show(command.View(Meter(LiveEngine(ring)), Sort.AGE), console, terminal, 60.0)
    assert not screen.todo
    assert "\x1b[?1049l" in screen.getvalue()  # the screen from before
    assert termios.tcgetattr(terminal) == before
    ring.close()
    os.close(terminal)
    os.close(keyboard)


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (200, {"object": "request.cancelled"}, "2.3 is cancelled"),
        (404, {"error": {"message": "request 2.3 is not open"}}, "2.3 is not cancelled: request 2.3 is not open"),
        (502, ["no"], "2.3 is not cancelled: the server at this address answers 502; is it Penstock?"),
    ],
)
def test_chosen_request_is_cancelled_with_the_admin_key_after_a_question(
    recorded: Recorded, status: int, answer: object, said: str
) -> None:
    sent: list[httpx2.Request] = []

    def serve(request: httpx2.Request) -> httpx2.Response:
        sent.append(request)
        return httpx2.Response(status, json=answer)

    def shown() -> str:
        console = Console(file=io.StringIO(), width=160)
        console.print(view.screen(40))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    ring = RingReader(recorded.fd)
    operator = Operator("http://server/", "open-sesame", httpx2.MockTransport(serve))
    view = command.View(Meter(LiveEngine(ring)), Sort.AGE, operator)
    view.press("c")
    assert "choose a request first" in shown()
    for key in "jkkjjc":
        view.press(key)
    assert "cancel 2.3? y or n" in shown()
    view.press("n")
    assert "2.3 is not cancelled" in shown()
    assert not sent
    for key in "cy":
        view.press(key)
    assert said in shown()
    (request,) = sent
    assert (request.method, request.url) == ("POST", "http://server/admin/requests/2.3/cancel")
    assert request.headers["authorization"] == "Bearer open-sesame"
    ring.close()


def test_terminal_that_goes_away_ends_the_view() -> None:
    keyboard, terminal = pty.openpty()
    with Keys(terminal) as keys:
        os.write(keyboard, b"x")
        assert keys.wait(10.0) == "x"
        assert keys.wait(0.0) is None
        os.close(keyboard)
        with pytest.raises(EOFError):
            keys.wait(10.0)
    os.close(terminal)
